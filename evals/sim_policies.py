"""Policies to simulate: fixed lengths, the adaptive controller, and an oracle that knows chances and costs.

The oracle plans with the same search as the controller, but from the true conditional chances and
the true cost of every step; it does not know which draws will be right, which nobody can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from evals.sim_run import SOURCE, Simulation
from specdec.batch import Batch, Drafts, Plan, StepSeconds, Verdict
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.control.planning import Costs, best_shape
from specdec.control.trace import TraceFile
from specdec.controller import Controller, FixedLength
from specdec.request import Request

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)


class Oracle:
    """Plans each step with what the simulation knows."""

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
        able = [(r, min(self.limits.budget(r), r.max_drafts)) for r in decoding]
        deepest = max(most for _, most in able)
        ladders = np.zeros((len(able), deepest))
        for i, (r, most) in enumerate(able):
            ladders[i, :most] = np.cumprod(simulation.served_of(r).chances(most))
        keys = sum(r.num_tokens for r in decoding)
        seats = max(simulation.scheduler.config.max_num_seqs - len(running), 0)
        owed = sum(r.num_owed_tokens for r in (*running, *waiting[:seats])) - len(decoding)
        prompts = min(owed, simulation.scheduler.config.max_num_batched_tokens // 2)
        alone = world.verify(len(decoding), keys, 0)
        beside = world.verify(len(decoding) + prompts, keys, prompts)
        tokens = len(decoding) + prompts
        verify = [alone + world.verify(tokens + n, keys, prompts) - beside for n in range(ladders.size + 1)]
        drafting = None if world.draft is None else np.array([0.0] + [world.draft(n + 1) for n in range(len(able))])
        opening = 0.0
        if world.draft is not None:
            opening = world.draft(sum(max(simulation.lag(r) - 2, 0) for r in decoding)) / 32
        shape = best_shape(len(decoding), ladders, Costs(np.array(verify), drafting, opening))
        self._depths = {r.request_id: depth for (r, _), depth in zip(able, shape.depths, strict=True)}

    def budget(self, request: Request) -> int:
        """As planned."""
        return self._depths.get(request.request_id, 0)

    def admit(self, plan: Plan, drafts: Drafts) -> Batch:
        """All that were planned."""
        return self.limits.admit(plan, drafts)

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
