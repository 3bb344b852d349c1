"""Load: requests put to a system at a chosen pace, and the moment each of them gained tokens.

It knows jobs, clocks and concurrency. It does not know how a system decodes or whether it is right.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from evals.stages import StepShape
from evals.workloads import Prompt
from specdec.engine import Engine
from specdec.request import Request, RequestStats
from specdec.sampling_params import SamplingParams, SpeculativeParams


@dataclass(frozen=True, slots=True)
class Job:
    """One request, the same for every system; its seed fixes its text.

    token_ids   of the whole prompt, template applied
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Outcome:
    """What became of a job; times are seconds of one clock.

    emissions   (time, new tokens) of every moment the client would have seen something
    text        only from systems that give no token ids
    stats       None where the system does not say
    """

    submitted: float
    token_ids: list[int] = field(default_factory=list)
    emissions: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stats: RequestStats | None = None
    text: str | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, by the system's own count."""
        return sum(n for _, n in self.emissions)

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token."""
        return self.emissions[0][0] - self.submitted

    @property
    def e2e(self) -> float:
        """Seconds from submission to the last token."""
        return self.emissions[-1][0] - self.submitted

    @property
    def itls(self) -> list[float]:
        """Gaps between emissions as a streaming client sees them; tokens of one step arrive together."""
        return [late - early for (early, _), (late, _) in pairwise(self.emissions)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class System(Protocol):
    """Anything that can be put under load.

    max_concurrency   None: no limit
    """

    label: str
    max_concurrency: int | None

    def run(self, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
        """Serve all jobs with `concurrency` in flight; outcomes in the order of the jobs."""
        ...

    def work(self) -> tuple[dict[str, float], int]:
        """Seconds of every stage and steps so far; ({}, 0) where the system does not say."""
        ...

    def steps(self) -> list[StepShape]:
        """The steps of the last run; none where the system does not say."""
        ...


def sampling_params(job: Job, speculative: SpeculativeParams) -> SamplingParams:
    """A job in the engine's terms."""
    return SamplingParams(
        temperature=job.temperature, seed=job.seed, max_tokens=job.max_tokens, speculative=speculative
    )


def closed_loop(engine: Engine, jobs: Sequence[Job], concurrency: int, speculative: SpeculativeParams) -> list[Outcome]:
    """Keep `concurrency` requests in flight until all jobs are served, stepping the engine here.

    A job is submitted when a place is free, so no time is spent waiting outside the engine.
    """
    waiting = deque(enumerate(jobs))
    outcomes: list[Outcome | None] = [None] * len(jobs)
    in_flight: dict[str, int] = {}
    try:
        while waiting or in_flight:
            while waiting and len(in_flight) < concurrency:
                index, job = waiting.popleft()
                outcomes[index] = Outcome(time.perf_counter())
                request = engine.make_request(f"eval-{index}", job.token_ids, sampling_params(job, speculative))
                engine.add(request)
                in_flight[request.request_id] = index
            gains = engine.step()
            now = time.perf_counter()
            for gain in gains:
                outcome = outcomes[in_flight[gain.request.request_id]]
                assert outcome is not None
                record(outcome, gain.request, gain.token_ids, now)
                if gain.request.is_finished:
                    del in_flight[gain.request.request_id]
    finally:
        for request_id in in_flight:  # an interrupt leaves the engine clean for the next run
            engine.abort(request_id)
    return [outcome for outcome in outcomes if outcome is not None]


def record(outcome: Outcome, request: Request, token_ids: tuple[int, ...], now: float) -> None:
    """Note what a request gained at this moment; a failed request ends the measurement."""
    if token_ids:
        outcome.token_ids += token_ids
        outcome.emissions.append((now, len(token_ids)))
    if request.is_finished:
        if request.error is not None:
            raise RuntimeError(f"{request.request_id} failed: {request.error}")
        outcome.finish_reason = request.finish_reason.value if request.finish_reason else None
        outcome.stats = request.stats
