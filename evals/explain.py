"""Explain: what the controller decided, step by step, and how well it foresaw what came of it.

    python -m evals.explain TRACE [--png FILE]

TRACE is what `--speculative-trace PATH` (or `speculative_trace=`) wrote. It knows that file's
format and draws; it decides nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from evals.table import render

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 100
BINS = 10

Step = dict[str, Any]


def read(path: Path) -> list[Step]:
    """The steps of a trace; a last line cut short is left out."""
    steps = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not a line of a trace: {error}") from error
    if not steps or "plain_rate" not in steps[0]:
        raise ValueError(f"{path} is not a trace; --speculative-trace PATH writes one")
    return steps


def drafts(step: Step) -> int:
    """Drafts that were verified in a step."""
    return sum(row["admitted"] for row in step["rows"])


def ratios(steps: Sequence[Step]) -> list[float]:
    """Predicted over real seconds of each step."""
    return [s["predicted"] / (s["draft"] + s["verify"]) for s in steps if s["draft"] + s["verify"] > 0]


def num_changes(steps: Sequence[Step]) -> int:
    """How often drafting was turned on or off, probes apart."""
    planned = [s["kind"] == "plan" for s in steps if s["kind"] in ("plan", "zero")]
    return sum(a != b for a, b in pairwise(planned))


def spark(values: Sequence[float], top: float | None = None) -> str:
    """Means of at most WIDTH stretches as bars.

    >>> spark([0, 1, 2], top=2)
    ' ▄█'
    """
    if not values:
        return ""
    size = -(-len(values) // WIDTH)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    top = top or max(means) or 1.0
    return "".join(BARS[round(min(max(m / top, 0.0), 1.0) * (len(BARS) - 1))] for m in means)


Beliefs = Sequence[tuple[float, bool]]
"""The chance a draft was believed to have, and whether it was right; one entry a draft that was judged."""


def beliefs(steps: Sequence[Step]) -> list[tuple[float, bool]]:
    """Of all judged drafts; those that a grammar forces are certain, not believed, and are left out."""
    return [
        (chance, j < row["accepted"])
        for step in steps
        for row in step["rows"]
        for j, chance in enumerate(row["chances"][: row["accepted"] + 1])
        if chance < 1.0
    ]


def reliability(judged: Beliefs) -> list[tuple[float, float, int]]:
    """Believed chance, share that was right and number of drafts, by tenths of the belief."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for chance, is_right in judged:
        bins[min(int(chance * BINS), BINS - 1)].append((chance, is_right))
    return [
        (statistics.fmean(c for c, _ in own), statistics.fmean(float(right) for _, right in own), len(own))
        for _, own in sorted(bins.items())
    ]


def calibration_error(judged: Beliefs) -> float:
    """Mean distance of belief and truth over the tenths, weighted by drafts (Guo et al. 2017)."""
    total = len(judged)
    return (
        sum(abs(believed - right) * count for believed, right, count in reliability(judged)) / total if total else 0.0
    )


def chance_error(judged: Beliefs) -> float:
    """The calibration error that beliefs without fault would show: so few drafts a tenth stray by themselves."""
    spread: dict[int, float] = defaultdict(float)
    for chance, _ in judged:
        spread[min(int(chance * BINS), BINS - 1)] += chance * (1.0 - chance)
    return sum(math.sqrt(2.0 / math.pi * own) for own in spread.values()) / len(judged) if judged else 0.0


def calibration(judged: Beliefs) -> str:
    """One line: error, what chance alone makes of it, and bias (above 0 where too much is hoped for)."""
    if not judged:
        return "no drafts were judged"
    bias = statistics.fmean(chance - is_right for chance, is_right in judged)
    doubt = math.sqrt(sum(chance * (1.0 - chance) for chance, _ in judged)) / len(judged)
    return (
        f"calibration error {calibration_error(judged):.3f} over {len(judged)} judged drafts (faultless beliefs would "
        f"show {chance_error(judged):.3f}), bias {bias:+.3f} +- {doubt:.3f}"
    )


def text(steps: Sequence[Step]) -> str:
    """The whole page."""
    kinds = Counter(step["kind"] for step in steps)
    real = sum(s["draft"] + s["verify"] for s in steps)
    spent = {kind: sum(s["draft"] + s["verify"] for s in steps if s["kind"] == kind) / real for kind in kinds}
    parts = ratios(steps)
    lengths = Counter(row["admitted"] for s in steps for row in s["rows"] if row["budgeted"])
    zero = sum(not drafts(s) for s in steps) / len(steps)
    lines = [
        f"{len(steps)} steps, {real:.2f} s; {zero:.0%} of the steps without drafts; "
        f"on/off changes per 100 steps {100 * num_changes(steps) / len(steps):.1f}",
        render(["kind", "steps", "% of time"], [[k, str(n), f"{100 * spent[k]:.1f}"] for k, n in kinds.items()]),
        "",
        f"rows     {spark([s['decoding'] for s in steps])}",
        f"drafts   {spark([drafts(s) for s in steps])}",
        f"seconds  {spark([s['draft'] + s['verify'] for s in steps])}",
        "",
        f"predicted / real seconds: median {statistics.median(parts):.3f}, "
        f"mean distance {statistics.fmean(abs(r - 1) for r in parts):.3f}",
        "draft lengths of rows with room: " + "  ".join(f"{k}: {n}" for k, n in sorted(lengths.items())),
        "",
        _sources(steps),
        "",
        render(
            ["believed chance", "right", "drafts"],
            [[f"{believed:.3f}", f"{right:.3f}", str(count)] for believed, right, count in reliability(beliefs(steps))],
        ),
        calibration(beliefs(steps)),
    ]
    return "\n".join(lines)


def _sources(steps: Sequence[Step]) -> str:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for step in steps:
        for row in step["rows"]:
            if row["drafted"]:
                values = (row["drafted"], row["admitted"], row["accepted"], row["gain"])
                sums[row["source"]] = [a + b for a, b in zip(sums[row["source"]], values, strict=True)]
    rows = [[name, *(f"{v:.0f}" for v in own[:3]), f"{own[3]:.1f}"] for name, own in sums.items()]
    return render(["source", "drafted", "admitted", "accepted", "accepted as expected"], rows) if rows else "no drafts"


def plot(steps: Sequence[Step], path: Path) -> None:
    """Rows, drafts and seconds over the steps, and the reliability curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over, reliable) = pyplot.subplots(1, 2, figsize=(12, 4), width_ratios=(2, 1))
    numbers = range(len(steps))
    over.plot(numbers, [s["decoding"] for s in steps], label="rows")
    over.plot(numbers, [drafts(s) for s in steps], label="drafts verified", linewidth=0.8)
    over.set_xlabel("step")
    over.legend()
    seconds = over.twinx()
    seconds.plot(numbers, [1000 * (s["draft"] + s["verify"]) for s in steps], color="gray", linewidth=0.5)
    seconds.plot(numbers, [1000 * s["predicted"] for s in steps], color="black", linewidth=0.5, linestyle=":")
    seconds.set_ylabel("ms a step (dotted: predicted)")
    found = reliability(beliefs(steps))
    reliable.plot([0, 1], [0, 1], color="lightgray")
    reliable.plot([b for b, *_ in found], [r for _, r, _ in found], marker="o")
    reliable.set_xlabel("believed chance")
    reliable.set_ylabel("share that was right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m evals.explain", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--png", type=Path, help="draw it here as well")
    args = parser.parse_args(argv)
    try:
        steps = read(args.trace)
    except (OSError, ValueError) as error:
        print(f"evals.explain: {error}", file=sys.stderr)
        return 2
    print(text(steps))
    if args.png is not None:
        plot(steps, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
