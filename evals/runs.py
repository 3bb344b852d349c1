"""Runs: one system serving one workload once, as a record; and many of them, summed up.

It knows the formulas of every number the speed-up table shows. It does not measure and does not print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evals.cost_curve import CostCurve
from evals.equality import Fork, is_equal
from evals.intervals import Interval, interval, percentiles
from evals.load import Outcome
from evals.stages import StepShape
from specdec.request import RequestStats

KIND = "speedup.run"
PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system, one workload, one concurrency, one repetition.

    seconds      from the first submission to the last token
    ttft, e2e    a request each; itl a gap between emissions; tpot a request of two tokens or more
    stages       seconds of each stage of all steps; empty where the system does not say
    num_steps    steps of the whole batch
    steps        their shapes; none where the system does not say
    num_tokens   emitted, by the system's own count
    outputs      token ids of every request; empty lists from a server that gives none
    forks        where outputs left plain decoding
    peak_bytes   most memory of the process meanwhile; None where the system does not say
    same_texts   how many texts were plain decoding's, for a server that gives no ids; else None
    """

    workload: str
    concurrency: int
    system: str
    repeat: int
    seconds: float
    ttft: list[float]
    itl: list[float]
    tpot: list[float]
    e2e: list[float]
    stats: RequestStats | None
    stages: dict[str, float]
    num_steps: int
    steps: list[StepShape]
    num_tokens: int
    outputs: list[list[int]]
    forks: list[Fork]
    same_texts: int | None = None
    peak_bytes: int | None = None
    dtype: str

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What tells a run from all others with the same settings."""
        return self.workload, self.concurrency, self.system, self.repeat

    @property
    def throughput(self) -> float:
        """Emitted tokens per second, over all requests."""
        return self.num_tokens / self.seconds

    @property
    def is_equal(self) -> bool:
        """True where the outputs are plain decoding's, by the floating-point rule."""
        return is_equal(self.forks, self.num_tokens, self.dtype)

    def to_record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"tokens_per_second": self.throughput, "is_equal": self.is_equal}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Run:
        """Back from JSON; keys of other rooms are ignored."""
        missing = set(cls.__slots__) - set(record)
        if missing:
            raise ValueError(f"a {KIND} record lacks {', '.join(sorted(missing))}; another version wrote it")
        values = {name: record[name] for name in cls.__slots__}
        values["stats"] = RequestStats(**values["stats"]) if values["stats"] is not None else None
        values["steps"] = [StepShape(*step) for step in values["steps"]]
        values["forks"] = [Fork(**fork) for fork in values["forks"]]
        return cls(**values)


def times_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The timing fields of a Run."""
    done = [outcome for outcome in outcomes if outcome.emissions]
    return {
        "seconds": max(o.emissions[-1][0] for o in done) - min(o.submitted for o in outcomes),
        "ttft": [o.ttft for o in done],
        "itl": [gap for o in done for gap in o.itls],
        "tpot": [o.tpot for o in done if o.tpot is not None],
        "e2e": [o.e2e for o in done],
        "num_tokens": sum(o.num_tokens for o in done),
        "outputs": [o.token_ids for o in outcomes],
    }


def stats_of(outcomes: Sequence[Outcome]) -> RequestStats | None:
    """Acceptance summed over requests; None where a system does not report it."""
    total = RequestStats()
    for outcome in outcomes:
        if outcome.stats is None:
            return None
        total.add(outcome.stats)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All repetitions of one system at one workload and concurrency: a row of the table.

    throughput   tokens per second
    ratio        throughput over plain's of the same repetition; None for plain itself or without it
    predicted    the ratio that acceptance and the cost curve predict: what a step of each shape takes (over all
                 runs), times the steps of each shape, drafting included; None where steps are not known
    latency      "ttft" | "itl" | "tpot" | "e2e" -> "p50" | "p90" | "p99" -> seconds, repeats pooled
    stages       share of the step time of each stage
    """

    workload: str
    concurrency: int
    system: str
    throughput: Interval
    ratio: Interval | None
    predicted: float | None
    stats: RequestStats | None
    latency: dict[str, dict[str, float]]
    stages: dict[str, float]
    tokens_per_step: float | None
    num_forks: int
    num_outputs: int
    same_texts: int | None
    peak_bytes: int | None
    is_equal: bool

    @property
    def over_predicted(self) -> float | None:
        """The measured ratio over the predicted: below 1 by what is spent outside drafting and verifying."""
        return None if self.ratio is None or not self.predicted else self.ratio.median / self.predicted

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at position j that were accepted, given that one was judged there."""
        if self.stats is None:
            return []
        pairs = zip(self.stats.accepted_per_pos, self.stats.drafted_per_pos, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary a system, workload and concurrency, in the order they were first run."""
    cells: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.workload, run.concurrency, run.system), []).append(run)
    plain = {(run.workload, run.concurrency, run.repeat): run.throughput for run in runs if run.system == PLAIN}
    curve = CostCurve([step for run in runs for step in run.steps])
    rates = {key: _predicted_rate(cell, curve) for key, cell in cells.items()}
    made = []
    for (workload, concurrency, system), cell in cells.items():
        own, base = rates[workload, concurrency, system], rates.get((workload, concurrency, PLAIN))
        predicted = own / base if own and base and system != PLAIN else None
        made.append(_summary(cell, plain, predicted))
    return made


def _predicted_rate(runs: Sequence[Run], curve: CostCurve) -> float | None:
    """Tokens per second, did each step take what its shape takes; None where a run's steps are not known."""
    if not all(run.steps for run in runs):
        return None
    seconds = sum(curve.seconds(run.steps) for run in runs)
    return sum(run.num_tokens for run in runs) / seconds if seconds else None


def _summary(runs: list[Run], plain: dict[tuple[str, int, int], float], predicted: float | None) -> Summary:
    first = runs[0]
    pairs = [(run, plain.get((run.workload, run.concurrency, run.repeat))) for run in runs]
    ratios = [run.throughput / base for run, base in pairs if base is not None and run.system != PLAIN]
    stats = RequestStats() if all(run.stats is not None for run in runs) else None
    for run in runs:
        if stats is not None and run.stats is not None:
            stats.add(run.stats)
    num_steps = sum(run.num_steps for run in runs)
    return Summary(
        workload=first.workload,
        concurrency=first.concurrency,
        system=first.system,
        throughput=interval([run.throughput for run in runs]),
        ratio=interval(ratios) if ratios else None,
        predicted=predicted,
        stats=stats,
        latency={name: percentiles([t for run in runs for t in getattr(run, name)]) for name in _LATENCIES},
        stages=_shares(runs),
        tokens_per_step=sum(run.num_tokens for run in runs) / num_steps if num_steps else None,
        num_forks=sum(len(run.forks) for run in runs),
        num_outputs=sum(len(run.outputs) for run in runs),
        same_texts=None if first.same_texts is None else sum(run.same_texts or 0 for run in runs),
        peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
        is_equal=all(run.is_equal for run in runs),
    )


_LATENCIES = ("ttft", "itl", "tpot", "e2e")


def _shares(runs: Sequence[Run]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for run in runs:
        for stage, seconds in run.stages.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    whole = sum(totals.values())
    return {stage: seconds / whole for stage, seconds in totals.items()} if whole else {}
