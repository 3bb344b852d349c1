"""The speed-up tables: what a summary looks like on a terminal. It computes nothing that was not measured."""

from __future__ import annotations

from collections.abc import Sequence

from evals.intervals import Interval
from evals.runs import Summary
from evals.table import milliseconds
from evals.table import render as align


def render(summaries: Sequence[Summary]) -> str:
    """Speed and acceptance, latency, and the time split, with their definitions underneath."""
    return "\n\n".join([speed(summaries), latency(summaries), stages(summaries), NOTES])


NOTES = (
    "tok/s and ratio: median [95 % interval] of the repeats; the ratio is taken within a repeat. "
    "predicted: the ratio that acceptance and the cost curve (step time by rows and verified tokens, over all runs of "
    "this table) predict, drafting included; what the measured one falls short of it is time outside drafts and "
    "forwards. mean length: tokens per request and target step, the recovered or bonus token included. "
    "accepted at 1, 2, ...: of the drafts judged at that position. itl: gap between emissions of a request; "
    "tokens of one step arrive together. tpot: time per token behind the first. peak MiB: of this process, "
    "everything that is loaded included."
)


_SPEED_HEADERS = (
    "workload", "c", "system", "tok/s", "ratio to plain", "predicted", "measured/predicted", "mean length", "tok/step",
    "accepted at 1, 2, ...", "text",
)  # fmt: skip


Cells = tuple[Sequence[str], list[list[str]]]


MOST_PLACES = 5


def speed(summaries: Sequence[Summary]) -> str:
    """One line a system."""
    return align(*speed_cells(summaries))


def speed_cells(summaries: Sequence[Summary]) -> Cells:
    """Headers and rows of the speed table."""
    rows = [
        [
            s.workload,
            str(s.concurrency),
            s.system,
            _tokens(s.throughput),
            _ratio(s.ratio),
            _number(s.predicted),
            _number(s.over_predicted),
            _number(None if s.stats is None else s.stats.mean_acceptance_length),
            _number(s.tokens_per_step),
            _places(s.acceptance_by_position),
            verdict(s),
        ]
        for s in summaries
    ]
    return _SPEED_HEADERS, rows


def verdict(summary: Summary) -> str:
    """How the text compares with plain decoding's."""
    if summary.same_texts is not None:
        return f"{summary.same_texts} of {summary.num_outputs} texts the same"
    if not summary.is_equal:
        return f"DIFFERS ({summary.num_forks} outputs)"
    return "equal" if not summary.num_forks else f"equal but for {summary.num_forks} rounding forks"


def _tokens(value: Interval) -> str:
    if value.low is None or value.high is None:
        return f"{value.median:.1f}"
    return f"{value.median:.1f} [{value.low:.1f}, {value.high:.1f}]"


def _places(rates: Sequence[float]) -> str:
    """The first few; files hold them all."""
    shown = [f"{rate:.2f}" for rate in rates[:MOST_PLACES]]
    return " ".join([*shown, "..."] if len(rates) > MOST_PLACES else shown) or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(value: Interval | None) -> str:
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.median:.2f}"
    return f"{value.median:.2f} [{value.low:.2f}, {value.high:.2f}]"


def latency(summaries: Sequence[Summary]) -> str:
    """Milliseconds, P50 / P90 / P99."""
    return align(*latency_cells(summaries))


def latency_cells(summaries: Sequence[Summary]) -> Cells:
    """Headers and rows of the latency table."""
    names = ("ttft", "itl", "tpot", "e2e")
    rows = [
        [s.workload, str(s.concurrency), s.system, *(_three(s.latency[name]) for name in names), _mebibytes(s)]
        for s in summaries
    ]
    return ["workload", "c", "system", *(f"{name} ms p50/p90/p99" for name in names), "peak MiB"], rows


def _mebibytes(summary: Summary) -> str:
    return "-" if summary.peak_bytes is None else f"{summary.peak_bytes / 2**20:.0f}"


def _three(values: dict[str, float]) -> str:
    return "/".join(milliseconds(values[p]) for p in ("p50", "p90", "p99")) if values else "-"


def stages(summaries: Sequence[Summary]) -> str:
    """Where the step time went, in per cent."""
    known = [s for s in summaries if s.stages]
    names = list(known[0].stages) if known else []
    rows = [[s.workload, str(s.concurrency), s.system, *(f"{100 * s.stages[n]:.1f}" for n in names)] for s in known]
    return align(["% of step time:", "c", "system", *names], rows) if known else "no system reported its stages"
