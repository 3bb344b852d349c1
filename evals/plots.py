"""Plots of a speed-up run. It knows matplotlib and summaries; it decides nothing about what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from evals.intervals import percentile
from evals.runs import Run, Summary

matplotlib.rcParams.update({"svg.hashsalt": "specdec", "svg.fonttype": "path", "axes.grid": True, "grid.alpha": 0.3})

WIDTH, HEIGHT = 4.2, 3.4


def save(figure: Any, path: Path) -> None:
    """Write one file; the same numbers give the same bytes."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata=metadata)


def _panels(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """One panel a name, at most four beside each other."""
    columns = max(min(len(names), 4), 1)
    rows = max(-(-len(names) // columns), 1)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, name in zip(axes, names):
        axis.set_title(name)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    return figure, axes


def _unique(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def speedup(runs: Sequence[Run], summaries: Sequence[Summary]) -> Any:
    """Ratio to plain with its interval, one line a system, one panel a workload; 1 is break-even."""
    names = _unique([s.workload for s in summaries])
    figure, axes = _panels(names)
    for axis, name in zip(axes, names):
        axis.axhline(1, color="black", linewidth=1)
        for system in _unique([s.system for s in summaries if s.workload == name and s.ratio is not None]):
            line = [s for s in summaries if s.workload == name and s.system == system and s.ratio is not None]
            ratios = [s.ratio for s in line if s.ratio is not None]
            below = [r.median - (r.median if r.low is None else r.low) for r in ratios]
            above = [(r.median if r.high is None else r.high) - r.median for r in ratios]
            places = [s.concurrency for s in line]
            axis.errorbar(places, [r.median for r in ratios], [below, above], marker="o", capsize=3, label=system)
        axis.set_xscale("log", base=2)
        levels = sorted({s.concurrency for s in summaries})
        axis.set_xticks(levels, [str(level) for level in levels])
        axis.set_xlabel("requests in flight")
        axis.set_ylabel("tokens/s over plain")
        axis.legend(fontsize="small")
    return figure


def acceptance(runs: Sequence[Run], summaries: Sequence[Summary]) -> Any:
    """Acceptance at each draft position, one line a system, one panel a workload."""
    names = _unique([s.workload for s in summaries])
    figure, axes = _panels(names)
    for axis, name in zip(axes, names):
        drawn: set[str] = set()
        for summary in (s for s in summaries if s.workload == name and s.acceptance_by_position):
            if summary.system not in drawn:  # acceptance does not depend on concurrency; the first is drawn
                drawn.add(summary.system)
                rates = summary.acceptance_by_position
                axis.plot(range(1, len(rates) + 1), rates, marker="o", label=summary.system)
        axis.set_ylim(0, 1)
        axis.set_xlabel("draft position")
        axis.set_ylabel("accepted / judged")
        if drawn:
            axis.legend(fontsize="small")
    return figure


def latency(runs: Sequence[Run], summaries: Sequence[Summary]) -> Any:
    """Share of requests done within a time, one panel a concurrency, all workloads together."""
    levels = sorted({run.concurrency for run in runs})
    figure, axes = _panels([f"{level} in flight" for level in levels])
    for axis, level in zip(axes, levels):
        for system in _unique([run.system for run in runs if run.concurrency == level]):
            times = [t for run in runs if run.concurrency == level and run.system == system for t in run.e2e]
            axis.plot([percentile(times, p) for p in range(101)], [p / 100 for p in range(101)], label=system)
        axis.set_xlabel("seconds from submission to last token")
        axis.set_ylabel("share of requests")
        axis.legend(fontsize="small")
    return figure


def stages(runs: Sequence[Run], summaries: Sequence[Summary]) -> Any:
    """Milliseconds of each stage in the mean step, as bars; one panel a concurrency."""
    known = [run for run in runs if run.stages and run.num_steps]
    levels = sorted({run.concurrency for run in known})
    figure, axes = _panels([f"{level} in flight" for level in levels])
    for axis, level in zip(axes, levels):
        systems = _unique([run.system for run in known if run.concurrency == level])
        left = [0.0] * len(systems)
        for stage in known[0].stages:
            cells = [[r for r in known if r.concurrency == level and r.system == system] for system in systems]
            widths = [_mean_stage(cell, stage) for cell in cells]
            axis.barh(systems, widths, left=left, label=stage)
            left = [a + b for a, b in zip(left, widths)]
        axis.invert_yaxis()
        axis.set_xlabel("ms a step, mean")
        axis.legend(fontsize="small")
    return figure


def _mean_stage(runs: Sequence[Run], stage: str) -> float:
    return 1000 * sum(run.stages[stage] for run in runs) / sum(run.num_steps for run in runs)
