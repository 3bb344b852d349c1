"""Grid: is the adaptive controller as good as the best fixed policy of every cell, and better than each over all?

It knows finished runs and how to judge them without hindsight: the best fixed policy of a cell
(a workload at a concurrency; plain decoding is one of the policies) is picked on the even
repetitions and held against the adaptive one on the odd ones. It measures nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evals import workloads
from evals.intervals import Interval, interval
from evals.runs import PLAIN, Run
from evals.table import render

WORKLOADS = ("chat", "code", "copying", "adversarial")
CONCURRENCY = (1, 8, 32)
KS = (1, 2, 3, 5)
TEMPERATURE = {"adversarial": 5.0}  # the output is noise, and no draft is right but by luck
ADAPTIVE = "adaptive"
LEAST = 0.95
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def prompts(name: str) -> list[workloads.Prompt]:
    """The grid's own workloads, made from the project's prompts; the others by name."""
    if name == "copying":
        asked = "Repeat the following text word for word and add nothing.\n\n"
        return [workloads.Prompt(asked + p.text, name) for p in workloads.load_named("summarise")]
    if name == "adversarial":
        return [workloads.Prompt(p.text, name) for p in workloads.load_named("creative")]
    return workloads.load_named(name)


def enough(prompts: Sequence[workloads.Prompt], count: int) -> list[workloads.Prompt]:
    """At least `count` prompts; where there are fewer they come again behind numbers, so that none is used twice.

    >>> [p.text for p in enough([workloads.Prompt("a", "x"), workloads.Prompt("b", "x")], 3)]
    ['a', 'b', '(1) a', '(1) b']
    """
    rounds = range(-(-count // len(prompts)))
    return [replace(p, text=f"({n}) {p.text}" if n else p.text) for n in rounds for p in prompts]


def jobs_at(concurrency: int) -> int:
    """Requests of a cell: alone a few, else two waves, or one and a half where a wave is long."""
    return max(4, min(2 * concurrency, 16 + concurrency))


def tokens_of(index: int, mean: int) -> int:
    """Output tokens of request `index`: from half of the mean to one and a half of it, evenly spread.

    Requests of one length that are not drafted for end in the same step and let the next ones in together; no load of
    real requests does, and whoever drafts would be charged for ending that.

    >>> [tokens_of(i, 40) for i in range(6)]
    [20, 45, 29, 54, 39, 24]
    """
    return max(1, round(mean * (0.5 + index * GOLDEN % 1.0)))


@dataclass(frozen=True, slots=True)
class Cell:
    """One adaptive system in one workload at one concurrency.

    picked      the fixed policy that was best on the even repetitions
    to_picked   adaptive's throughput over its, odd repetitions; to_plain: over plain's, all repetitions
    """

    workload: str
    concurrency: int
    system: str
    picked: str
    to_picked: Interval
    to_plain: Interval

    @property
    def holds(self) -> bool:
        """True where both lower bounds are at least 0.95; False too where there is no bound."""
        return all(i.low is not None and i.low >= LEAST for i in (self.to_picked, self.to_plain))


Rates = dict[tuple[str, int], dict[str, dict[int, float]]]  # cell -> system -> repeat -> tokens per second


def rates_of(runs: Sequence[Run]) -> Rates:
    """Throughputs by cell, system and repetition."""
    found: Rates = {}
    for run in runs:
        found.setdefault((run.workload, run.concurrency), {}).setdefault(run.system, {})[run.repeat] = run.throughput
    return found


def is_adaptive(system: str) -> bool:
    """By its label."""
    return system.endswith(ADAPTIVE)


def judge(runs: Sequence[Run]) -> list[Cell]:
    """Every adaptive system of every cell; a cell of fewer than two repetitions cannot be judged."""
    cells = []
    for (workload, concurrency), systems in rates_of(runs).items():
        fixed = {name: own for name, own in systems.items() if not is_adaptive(name)}
        repeats = sorted(set.intersection(*(set(own) for own in systems.values())))
        if len(repeats) < 2:
            continue
        picking, scoring = repeats[::2], repeats[1::2]
        picked = max(fixed, key=lambda name: statistics.fmean(math.log(fixed[name][r]) for r in picking))
        for name in filter(is_adaptive, systems):
            to_picked = interval([systems[name][r] / fixed[picked][r] for r in scoring])
            to_plain = interval([systems[name][r] / fixed[PLAIN][r] for r in repeats])
            cells.append(Cell(workload, concurrency, name, picked, to_picked, to_plain))
    return cells


def overall(runs: Sequence[Run]) -> dict[str, dict[str, Interval]]:
    """Adaptive over each fixed policy: the geometric mean over all cells, an interval over the repetitions."""
    rates = rates_of(runs)
    systems = {name for own in rates.values() for name in own}
    found: dict[str, dict[str, Interval]] = {}
    for adaptive in sorted(filter(is_adaptive, systems)):
        for fixed in sorted(name for name in systems if not is_adaptive(name)):
            both = [(own[adaptive], own[fixed]) for own in rates.values() if adaptive in own and fixed in own]
            repeats = sorted(set.intersection(*(set(a) & set(b) for a, b in both))) if both else []
            means = [math.exp(statistics.fmean(math.log(a[r] / b[r]) for a, b in both)) for r in repeats]
            if means:
                found.setdefault(adaptive, {})[fixed] = interval(means)
    return found


def report(runs: Sequence[Run]) -> str:
    """Both tables and the verdict."""
    cells = judge(runs)
    rows = [
        [c.workload, str(c.concurrency), c.system, c.picked, str(c.to_picked), str(c.to_plain), _word(c.holds)]
        for c in cells
    ]
    lines = [
        render(["workload", "c", "system", "best fixed", "to best fixed", "to plain", "both bounds 0.95"], rows),
        f"{sum(c.holds for c in cells)} of {len(cells)} cells hold",
    ]
    for adaptive, others in overall(runs).items():
        rows = [[name, str(ratio), _word(ratio.low is not None and ratio.low > 1.0)] for name, ratio in others.items()]
        lines += ["", render([f"{adaptive} over", "all cells", "beaten"], rows)]
    lines.append(
        "\nratio: median [95 % interval] of repetitions, within a repetition; the best fixed policy is picked on the "
        "even repetitions and scored on the odd ones"
    )
    return "\n".join(lines)


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"
