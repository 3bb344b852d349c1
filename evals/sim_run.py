"""Simulation: the real scheduler, block pool and controller, with a clock that is computed instead of waited for.

It replaces models, proposers and time, and nothing else: a step costs what a World says, and a draft
is right with the chance its request's Process says. Token 1 is what the target always says; a draft
that is wrong is token 0.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from evals.sim_worlds import Process, World
from specdec.batch import Batch, Drafts, Plan, Row, StepSeconds, Verdict
from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig
from specdec.controller import Controller
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Scheduler

SOURCE = "simulated"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come; seed fixes which of its drafts are right, whatever the policy."""

    at: float
    num_prompt: int
    num_output: int
    process: Process
    seed: int


@dataclass(slots=True)
class _Served:
    arrival: Arrival
    request: Request
    luck: list[float]
    offer_luck: list[float]
    first: float = 0.0
    last: float = 0.0

    def chances(self, depth: int) -> list[float]:
        """The true chances of the next drafts, if there is an offer."""
        return self.arrival.process.chances(self.request.num_output_tokens / self.arrival.num_output, depth)

    def offer(self, depth: int) -> tuple[int, ...]:
        """The next drafts: 1 where right, 0 where wrong; empty where nothing is offered."""
        start, luck = self.request.num_output_tokens, self.luck
        process = self.arrival.process
        if process.offered and self.offer_luck[start % len(luck)] >= process.offers(start / self.arrival.num_output):
            return ()
        return tuple([int(luck[(start + j) % len(luck)] < chance) for j, chance in enumerate(self.chances(depth))])


@dataclass(slots=True)
class SimResult:
    """What a policy did.

    busy      seconds in which a step ran; end: when the last request ended
    ttft      seconds from arrival to the first token; itl: gaps between emissions; tpot: per token behind the first
    depths    (time, rows, deepest draft verified) of every step, where asked for
    """

    busy: float = 0.0
    end: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_zero_steps: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    depths: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def busy_rate(self) -> float:
        """Tokens per busy second."""
        return self.num_tokens / self.busy


class Simulation:
    """A server in simulated time.

    max_num_seqs, max_num_batched_tokens   of the scheduler
    keep_depths                            note the depth of every step
    """

    def __init__(
        self, world: World, *, max_num_seqs: int = 64, max_num_batched_tokens: int = 512, keep_depths: bool = False
    ) -> None:
        self.world = world
        self.keep_depths = keep_depths
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            BlockPool(max_num_seqs * 64, BLOCK_SIZE, enable_prefix_caching=False),
        )
        self.now = 0.0
        self.result = SimResult()
        self.served: dict[str, _Served] = {}
        self.draft_computed: dict[str, int] = {}
        self._params = SamplingParams(temperature=0, ignore_eos=True)
        self._count = 0

    # ------------------------------------------------------------------ requests

    def add(self, arrival: Arrival) -> None:
        """A request arrives now."""
        self._count += 1
        request = Request(
            str(self._count), [1] * arrival.num_prompt, self._params, max_output_tokens=arrival.num_output
        )
        rng = random.Random(arrival.seed)
        luck = [rng.random() for _ in range(arrival.num_output + 8)]
        offer_luck = [rng.random() for _ in luck] if arrival.process.offered else []
        self.served[request.request_id] = _Served(arrival, request, luck, offer_luck)
        self.scheduler.add(request)

    def lag(self, request: Request) -> int:
        """Tokens a model that drafts would have to catch up with."""
        return request.num_tokens - self.draft_computed.get(request.request_id, 0)

    def served_of(self, request: Request) -> _Served:
        """The simulator's side of a request."""
        return self.served[request.request_id]

    def run_open(self, controller: Controller, arriving: Iterator[Arrival], count: int) -> SimResult:
        """Requests arrive at their own times, whether the server keeps up or not."""
        coming = next(arriving)
        left = count
        while left or self.scheduler.has_work:
            if left and not self.scheduler.has_work:
                self.now = max(self.now, coming.at)
            while left and coming.at <= self.now:
                self.add(coming)
                left -= 1
                if left:
                    coming = next(arriving)
            self.step(controller)
        return self.result

    def run_closed(self, controller: Controller, arriving: Sequence[Arrival], concurrency: int) -> SimResult:
        """So many requests are in flight until none is left; a place that is free is taken at once."""
        left = deque(arriving)
        while left or self.scheduler.has_work:
            self.refill(left, concurrency)
            self.step(controller)
        return self.result

    def refill(self, left: deque[Arrival], concurrency: int) -> None:
        """Fill free places."""
        while left and len(self.scheduler.running) + len(self.scheduler.waiting) < concurrency:
            arrival = left.popleft()
            self.add(Arrival(self.now, arrival.num_prompt, arrival.num_output, arrival.process, arrival.seed))

    # ------------------------------------------------------------------ a step, as the engine makes it

    def step(self, controller: Controller) -> None:
        """One step of the engine."""
        scheduler = self.scheduler
        controller.prepare(scheduler.running, scheduler.waiting)
        plan = scheduler.schedule(controller.budget)
        if not plan.rows:
            return
        drafts, draft_seconds = self._propose(plan)
        batch = controller.admit(plan, drafts)
        verify_seconds = self._verify_seconds(batch)
        verdict = Verdict(tuple(_judge(row) for row in batch), (False,) * len(batch))
        controller.observe(batch, verdict, StepSeconds(draft_seconds, verify_seconds))
        self._roll_back(batch, verdict)
        self.now += draft_seconds + verify_seconds
        self._note(batch, verdict, scheduler, draft_seconds + verify_seconds)

    def _propose(self, plan: Plan) -> tuple[Drafts, float]:
        offers = [self.served_of(row.request).offer(row.max_drafts) if row.max_drafts else () for row in plan]
        return Drafts.of(offers, SOURCE), self._draft_seconds(plan)

    def _draft_seconds(self, plan: Plan) -> float:
        """What the passes cost; rows that lag are brought up to date in the first of them."""
        deepest = max((row.max_drafts for row in plan), default=0)
        if self.world.draft is None or not deepest:
            return 0.0
        first = 0
        for row in plan:
            if row.max_drafts or row.num_base > 1:
                known = self.draft_computed.get(row.request.request_id, 0)
                first += max(row.end - known, 0)
                self.draft_computed[row.request.request_id] = row.end + max(row.max_drafts - 1, 0)
        sizes = [first, *(sum(row.max_drafts > j for row in plan) for j in range(1, deepest))]
        return sum(self.world.draft(size) for size in sizes)

    def _roll_back(self, batch: Batch, verdict: Verdict) -> None:
        if self.world.draft is None:
            return
        for index, row in enumerate(batch):
            known = self.draft_computed.get(row.request.request_id)
            if known is not None:
                self.draft_computed[row.request.request_id] = min(known, row.end + verdict.num_accepted(index))

    def _verify_seconds(self, batch: Batch) -> float:
        prompts = sum(row.num_base for row in batch if row.num_base > 1)
        return self.world.verify(batch.num_tokens, sum(row.start for row in batch), prompts)

    def _note(self, batch: Batch, verdict: Verdict, scheduler: Scheduler, seconds: float) -> None:
        result, deepest, decoding = self.result, 0, 0
        result.busy += seconds
        result.num_steps += 1
        for row in batch:
            deepest = max(deepest, len(row.draft_token_ids))
            decoding += row.num_base == 1
        result.num_zero_steps += deepest == 0
        for gain in scheduler.commit(batch, verdict):
            result.num_drafts += gain.num_drafted
            result.num_accepted += gain.num_accepted
            if gain.token_ids:
                self._emit(self.served_of(gain.request), len(gain.token_ids))
        if self.keep_depths:
            result.depths.append((self.now, decoding, deepest))

    def _emit(self, served: _Served, num_tokens: int) -> None:
        result, request = self.result, served.request
        result.num_tokens += num_tokens
        if served.last:
            result.itl.append(self.now - served.last)
        else:
            served.first = self.now
            result.ttft.append(self.now - served.arrival.at)
        served.last = self.now
        if request.is_finished:
            if request.num_output_tokens > 1:
                result.tpot.append((served.last - served.first) / (request.num_output_tokens - 1))
            result.end = self.now
            del self.served[request.request_id]
            self.draft_computed.pop(request.request_id, None)


def _judge(row: Row) -> tuple[int, ...]:
    """What the target says of a row: ones, up to and including the first that differs from its draft."""
    if not row.chooses:
        return ()
    drafts = row.draft_token_ids
    return (1,) * ((drafts.index(0) if 0 in drafts else len(drafts)) + 1)
