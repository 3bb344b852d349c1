"""Planning: the draft depths that promise the most emitted tokens per second.

It knows ladders of chances and two cost functions; it knows no requests, proposers or history. A
row's ladder is S(r, 1) >= S(r, 2) >= ..., the chances that its first i drafts are all accepted, so
inside a maximum depth the best set of n drafts is the n largest S, whatever the costs; what is left
to search is n and the depth, and both are tried in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """What was chosen for a step.

    depths     drafts of each row
    expected   drafts that will be accepted
    seconds    what the drafts and the row's own tokens will take, prompts of the same step not counted
    rate       emitted tokens per second: (rows + expected) / seconds
    """

    depths: tuple[int, ...]
    expected: float
    seconds: float
    rate: float

    @property
    def num_drafts(self) -> int:
        """Drafts of all rows."""
        return sum(self.depths)

    @property
    def max_depth(self) -> int:
        """The deepest row's."""
        return max(self.depths, default=0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds as functions of what is chosen.

    verify     number of drafts verified -> seconds of the target's forward
    drafting   rows -> seconds of one draft pass over them; None where drafting is free, or done already
    opening    seconds that any drafting costs once (tokens the draft lacks)
    """

    verify: Callable[[int], float]
    drafting: Callable[[int], float] | None = None
    opening: float = 0.0


def best_shape(num_rows: int, ladders: Sequence[Sequence[float]], costs: Costs) -> Shape:
    """The best over all depths and sets of drafts, none at all included.

    num_rows   rows that emit a token of their own; the ladders are of some or all of them
    """
    shapes = shapes_by_depth(num_rows, ladders, costs)
    return max(shapes, key=lambda shape: shape.rate)  # the first of equals, so the shallowest


def shapes_by_depth(num_rows: int, ladders: Sequence[Sequence[float]], costs: Costs) -> list[Shape]:
    """The best shape of every maximum depth, from 0 on; where drafting is free only of 0 and the deepest."""
    ordered = sorted(
        ((chance, -j, r) for r, ladder in enumerate(ladders) for j, chance in enumerate(ladder)), reverse=True
    )
    verify = [costs.verify(0)]
    deepest = max((len(ladder) for ladder in ladders), default=0)
    plain = Shape((0,) * len(ladders), 0.0, verify[0], num_rows / verify[0])
    if costs.drafting is None:
        depths: Sequence[int] = (deepest,) if deepest else ()
    else:
        depths = range(1, deepest + 1)
    return [plain, *(_best_at(num_rows, len(ladders), ordered, depth, costs, verify) for depth in depths)]


def _best_at(
    num_rows: int,
    num_ladders: int,
    ordered: Sequence[tuple[float, int, int]],
    depth: int,
    costs: Costs,
    verify: list[float],
) -> Shape:
    """Take drafts in order of their chance, and remember where tokens per second were highest.

    verify   seconds by number of drafts, filled as far as it is asked for
    """
    passes = _PassCosts(costs, depth)
    expected, taken = 0.0, 0
    best = (-1.0, 0, 0.0, 0.0)
    for chance, minus_j, _ in ordered:
        if -minus_j >= depth:
            continue
        expected += chance
        taken += 1
        if taken == len(verify):
            verify.append(costs.verify(taken))
        seconds = verify[taken] + passes.add(-minus_j)
        rate = (num_rows + expected) / seconds
        if rate > best[0]:
            best = (rate, taken, expected, seconds)
    depths = [0] * num_ladders
    kept = 0
    for _, minus_j, r in ordered:
        if kept == best[1]:
            break
        if -minus_j < depth:
            depths[r] += 1
            kept += 1
    return Shape(tuple(depths), best[2], best[3], best[0])


class _PassCosts:
    """Seconds of the draft passes while drafts are added one by one."""

    def __init__(self, costs: Costs, depth: int) -> None:
        self._one_pass = costs.drafting
        self._total = costs.opening
        self._rows = [0] * depth
        self._known = [0.0]

    def add(self, j: int) -> float:
        """One more row goes through pass j; return the seconds of all passes."""
        if self._one_pass is None:
            return self._total
        self._rows[j] += 1
        rows = self._rows[j]
        if rows == len(self._known):
            self._known.append(self._one_pass(rows))
        self._total += self._known[rows] - self._known[rows - 1]
        return self._total
