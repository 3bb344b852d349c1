"""Cost curve: what a step of so many rows and verified tokens takes, by the steps of one eval's runs.

It knows the engine's own records of steps, and predicts the seconds of any run from how many steps of
which shape it took. It knows no systems, and nothing of the time between steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from evals.stages import StepShape


class CostCurve:
    """Seconds by rows and tokens: geometric means of the steps without prompts, rising with the tokens.

    A geometric mean is drawn to high outliers less than a mean, and to no other side where steps are
    few than where they are many, as a median would be.

    per_prompt   seconds a prompt token adds to a step; pooled over all steps that had any
    """

    def __init__(self, steps: Sequence[StepShape]) -> None:
        logs: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for step in steps:
            if step.rows and not step.prompts and step.verify > 0:
                logs[step.rows][step.tokens].append(math.log(step.verify))
        self._logs = logs
        self._by_rows = {rows: _rising(own) for rows, own in sorted(logs.items())}
        mixed = [step for step in steps if step.prompts]
        extra = sum(max(step.verify - self.at(step.rows, step.tokens), 0.0) for step in mixed)
        self.per_prompt = extra / sum(step.prompts for step in mixed) if mixed else 0.0

    def at(self, rows: int, tokens: int) -> float:
        """Seconds to verify `tokens` of `rows`; by the nearest number of rows that was seen, 0 for none."""
        if not rows or not self._by_rows:
            return 0.0
        sizes, seconds = self._by_rows[min(self._by_rows, key=lambda seen: (abs(seen - rows), seen))]
        return float(np.interp(tokens, sizes, seconds))

    def by_tokens(self) -> list[tuple[int, float]]:
        """Seconds by tokens alone, all rows together."""
        pooled: dict[int, list[float]] = defaultdict(list)
        for own in self._logs.values():
            for tokens, logs in own.items():
                pooled[tokens] += logs
        return list(zip(*_rising(pooled), strict=True))

    def seconds(self, steps: Sequence[StepShape]) -> float:
        """What these steps should have taken; their drafting counts as it was measured."""
        return sum(self.at(s.rows, s.tokens) + self.per_prompt * s.prompts + s.draft for s in steps)


def _rising(logs: dict[int, list[float]]) -> tuple[list[int], list[float]]:
    """Sizes and seconds, by pooling neighbours that fall (isotonic regression on the logarithms; Ayer et al. 1955)."""
    pools: list[tuple[float, int, int]] = []  # mean, steps, sizes
    for size in sorted(logs):
        pools.append((math.fsum(logs[size]) / len(logs[size]), len(logs[size]), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n, i), (b, m, j) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m, i + j)]
    return sorted(logs), [math.exp(mean) for mean, _, sizes in pools for _ in range(sizes)]
