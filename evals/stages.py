"""Stages: where the time of a step goes, seen by standing between the engine and its parts.

It knows the public verbs of scheduler, proposer, target and controller. It changes nothing they do. On
a GPU "forward" is the time to launch it, and the wait for its result falls into "verify".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from specdec.batch import Batch, StepSeconds, Verdict
from specdec.controller import Controller
from specdec.engine import Engine
from specdec.scheduler import Emitted

STAGES = ("schedule", "propose", "pack", "forward", "verify", "commit")
"""What a step consists of; "verify" is what is left when the others are taken away: batch building,
sampling and the engine's own glue."""


@dataclass(slots=True)
class StageClock:
    """Seconds of every stage, of the current step and of all steps."""

    step: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    total: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def timed(self, stage: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        """The same verb, its time added to a stage."""

        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return verb(*arguments, **options)
            finally:
                self.step[stage] += time.perf_counter() - began

        return run


class _Watched:
    """A part of the engine with some of its verbs timed; everything else is the part itself."""

    def __init__(self, part: Any, clock: StageClock, verbs: Mapping[str, str]) -> None:
        self._part = part
        self._timed = {verb: clock.timed(stage, getattr(part, verb)) for verb, stage in verbs.items()}

    def __getattr__(self, name: str) -> Any:
        timed = self._timed.get(name)
        return timed if timed is not None else getattr(self._part, name)


class StepShape(NamedTuple):
    """What one step computed and what it took, by the engine's own record.

    rows      requests that decode
    tokens    of those rows, drafts included
    prompts   prompt tokens beside them
    draft     seconds from the plan to the drafts, and what the draft does with the verdict
    verify    seconds from the drafts to the verdict; both in whole microseconds
    """

    rows: int
    tokens: int
    prompts: int
    draft: float
    verify: float

    @classmethod
    def of(cls, batch: Batch, seconds: StepSeconds, proposing: float = 0.0) -> StepShape:
        """Of a batch that was served; `proposing`: seconds in the proposer, where they are known."""
        decoding = [row.query_len for row in batch if row.chooses and row.num_base == 1]
        tokens = sum(decoding)
        prompts = batch.num_tokens - tokens
        draft = max(seconds.draft, proposing)
        return cls(len(decoding), tokens, prompts, round(draft, 6), round(seconds.verify, 6))


class HeardController:
    """A controller, with a note of every step it is told of; it decides as it would alone."""

    def __init__(self, controller: Controller, steps: list[StepShape], clock: StageClock) -> None:
        self.totals = controller.totals
        self.prepare = controller.prepare
        self.budget = controller.budget
        self.admit = controller.admit
        self._controller = controller
        self._steps = steps
        self._clock = clock

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """Note it and pass it on."""
        self._steps.append(StepShape.of(batch, seconds, self._clock.step["propose"]))
        self._controller.observe(batch, verdict, seconds)


class WatchedEngine(Engine):
    """The same engine over the same parts, with a clock on each.

    steps   shapes of the steps served under a controller from `heard`
    """

    def __init__(self, engine: Engine) -> None:
        self.clock = StageClock()
        self.steps: list[StepShape] = []
        scheduler = _Watched(engine.scheduler, self.clock, {"schedule": "schedule", "commit": "commit"})
        proposer = _Watched(engine.proposer, self.clock, {"propose": "propose", "observe": "propose"})
        target = _Watched(engine.target, self.clock, {"pack": "pack", "forward": "forward"})
        super().__init__(
            cast(Any, target), cast(Any, proposer), engine.controller, cast(Any, scheduler),
            max_model_len=engine.max_model_len,
        )  # fmt: skip
        self.around_step = engine.around_step

    def heard(self, controller: Controller) -> Controller:
        """The same controller, its steps noted here."""
        return cast(Controller, HeardController(controller, self.steps, self.clock))

    def step(self) -> list[Emitted]:
        """One step, its stages on the clock."""
        clock = self.clock
        clock.step = dict.fromkeys(STAGES, 0.0)
        began = time.perf_counter()
        emitted = super().step()
        clock.step["verify"] = time.perf_counter() - began - sum(clock.step.values())
        for stage, seconds in clock.step.items():
            clock.total[stage] += seconds
        return emitted
