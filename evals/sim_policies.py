"""Policies to simulate: fixed lengths, the adaptive controller, and an oracle that knows chances and costs.

The oracle plans with the same search as the controller, but from the true conditional chances and
the true cost of every step; it does not know which draws will be right, which nobody can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from evals.sim_run import SOURCE, Simulation
from specdec.batch import Batch, Drafts, Plan, StepSeconds, Verdict
from specdec.control.adaptive import AdaptiveLength
from specdec.control.beliefs import reached
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.control.planning import Costs, best_shape
from specdec.control.trace import TraceFile
from specdec.controller import Controller, FixedLength
from specdec.request import Request

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)


class Oracle:
    """Plans each step with what the simulation knows; where drafting is free it decides once it has seen the offers.

    It takes the best of each step, which need not be the best of a run: plain decoding of equal lengths stays in
    step, and admits its prompts together.
    """

    totals = None

    def __init__(self, simulation: Simulation, most: int) -> None:
        self.simulation = simulation
        self.limits = FixedLength(most, None)
        self._depths: dict[str, int] = {}

    def prepare(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """The best depths, were no prompt in the step but those that run."""
        world, simulation = self.simulation.world, self.simulation
        decoding = [r for r in running if r.num_owed_tokens == 1]
        self._depths = {}
        if not decoding:
            return
        most = [min(self.limits.budget(r), r.max_drafts) for r in decoding]
        seats = max(simulation.scheduler.config.max_num_seqs - len(running), 0)
        owed = sum(r.num_owed_tokens for r in (*running, *waiting[:seats])) - len(decoding)
        if world.draft is None and not owed:  # all the room there is; what is not worth verifying is not admitted
            self._depths = {r.request_id: own for r, own in zip(decoding, most, strict=True)}
            return
        ladders = self._ladders(decoding, most)
        prompts = min(owed, simulation.scheduler.config.max_num_batched_tokens // 2)
        verify = self._verify(decoding, prompts, sum(most))
        drafting = None if world.draft is None else [0.0] + [world.draft(n + 1) for n in range(len(most))]
        opening = 0.0
        if world.draft is not None:
            opening = world.draft(sum(max(simulation.lag(r) - 2, 0) for r in decoding)) / 32
        shape = best_shape(len(decoding), ladders, Costs(verify, drafting, opening))
        self._depths = {r.request_id: depth for r, depth in zip(decoding, shape.depths, strict=True)}

    def _ladders(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[float]]:
        """The true chances that the first drafts are all right, of each request as many as it may have."""
        pairs = zip(requests, most, strict=True)
        return [reached(self.simulation.served_of(request).chances(own)) for request, own in pairs]

    def _verify(self, decoding: Sequence[Request], prompts: int, most: int) -> list[float]:
        """Seconds of decoding with 0..most drafts: alone, and what drafts add beside the prompts."""
        verify, tokens = self.simulation.world.verify, len(decoding) + prompts
        keys = sum(r.num_tokens for r in decoding)
        rest = verify(len(decoding), keys, 0) - verify(tokens, keys, prompts)
        return [rest + verify(tokens + n, keys, prompts) for n in range(most + 1)]

    def budget(self, request: Request) -> int:
        """As planned."""
        return self._depths.get(request.request_id, 0)

    def admit(self, plan: Plan, drafts: Drafts) -> Batch:
        """All that were planned; where drafting is free, those that are worth verifying."""
        if self.simulation.world.draft is not None:
            return self.limits.admit(plan, drafts)
        offered = [(row.request, len(o.token_ids)) for row, o in zip(plan, drafts, strict=True) if o.token_ids]
        if not offered:
            return Batch(plan.rows)
        ladders = self._ladders([request for request, _ in offered], [most for _, most in offered])
        decoding = [row.request for row in plan if row.chooses and row.num_base == 1]
        prompts = sum(row.num_base for row in plan) - len(decoding)
        verify = self._verify(decoding, prompts, sum(map(len, ladders)))
        shape = best_shape(len(decoding), ladders, Costs(verify))
        depths = iter(shape.depths)
        offers = tuple(offer.cut(next(depths)) if offer.token_ids else offer for offer in drafts)
        return self.limits.admit(plan, Drafts(offers))

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """There is nothing it does not know."""


def adaptive(
    simulation: Simulation, most: int, *, distort: Callable[[int], float] | None = None, trace: TraceFile | None = None
) -> AdaptiveLength:
    """The controller as assembly builds it, seeded by the world's own costs at the profile's sizes.

    distort   tokens -> factor on the seed, to see wrong costs unlearned
    """
    world = simulation.world
    most_tokens, rows = simulation.scheduler.config.max_num_batched_tokens, simulation.scheduler.config.max_num_seqs

    def seed(cost: Callable[[int], float]) -> Mapping[int, float]:
        return {n: cost(n) * (distort(n) if distort is not None else 1.0) for n in SIZES}

    verify = ForwardCost(most_tokens, seed(lambda n: world.verify(n, 0, 0)))
    sources, draft = Sources(free=(SOURCE,)), None
    if world.draft is not None:
        sources, draft = Sources(costly=SOURCE, lag=simulation.lag), ForwardCost(most_tokens, seed(world.draft))
    limits = FixedLength(most, None)
    return AdaptiveLength(limits, sources, verify, draft, most_tokens=most_tokens, most_rows=rows, trace=trace)


def make(name: str, simulation: Simulation, most: int) -> Controller:
    """A policy by name: "plain", "k=N", "adaptive" or "oracle"."""
    if name == "oracle":
        return Oracle(simulation, most)
    if name == "adaptive":
        return adaptive(simulation, most)
    return FixedLength(0 if name == "plain" else int(name.removeprefix("k=")), None)
