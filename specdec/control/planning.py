"""Planning: the draft depths that promise the most emitted tokens per second.

It knows ladders of chances and two tables of costs; it knows no requests, proposers or history. A
row's ladder is S(r, 1) >= S(r, 2) >= ..., the chances that its first i drafts are all accepted, so
inside a maximum depth the best set of n drafts is the n largest S, whatever the costs; what is left
to search is n and the depth, and both are tried in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np


@dataclass(frozen=True, slots=True)
class Shape:
    """What was chosen for a step.

    depths     drafts of each row
    expected   drafts that will be accepted
    seconds    what the drafts and the rows' own tokens will take, prompts of the same step not counted
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
    """Seconds by what is chosen.

    verify     [N+1]   of the target's forward with 0..N drafts
    drafting   [R+1]   of one draft pass over 0..R rows; None where drafting is free, or done already
    opening            what any drafting costs once (tokens the draft lacks)
    """

    verify: Sequence[float]
    drafting: Sequence[float] | None = None
    opening: float = 0.0


FEW = 96
"""Drafts times depths up to which Python's floats are quicker than arrays."""

Ladders = Sequence[Sequence[float]]
"""S of each row, as far as it may go: [R][K], or shorter."""


def best_shape(num_rows: int, ladders: Ladders, costs: Costs) -> Shape:
    """The best over all depths and sets of drafts, none at all included; the shallowest of equals.

    num_rows   rows that emit a token of their own; the ladders are of some or all of them
    """
    return max(shapes_by_depth(num_rows, ladders, costs), key=lambda shape: shape.rate)


def shapes_by_depth(num_rows: int, ladders: Ladders, costs: Costs) -> list[Shape]:
    """The best shape of every maximum depth, from 0 on; where drafting is free only of 0 and the deepest."""
    deepest = max(map(len, ladders), default=0)
    plain = costs.verify[0]
    shapes = [Shape((0,) * len(ladders), 0.0, plain, num_rows / plain)]
    depths = range(deepest, deepest + 1) if costs.drafting is None else range(1, deepest + 1)
    found = few_shapes if len(ladders) * deepest * len(depths) <= FEW else many_shapes
    return shapes + found(num_rows, ladders, costs, depths) if deepest else shapes


def worthwhile(num_rows: int, ladders: Ladders, verify: Sequence[float], spent: float) -> Sequence[int]:
    """The depths of `best_shape` where the drafts are there already and `spent` seconds are gone for them."""
    if sum(map(len, ladders)) > FEW:
        return best_shape(num_rows, ladders, Costs([seconds + spent for seconds in verify])).depths
    drafts = [(s, row) for row, own in enumerate(ladders) for s in own if s > 0.0]
    drafts.sort(key=itemgetter(0), reverse=True)  # stable, in reverse too
    expected, best, taken = float(num_rows), num_rows / (verify[0] + spent), 0
    for n, (s, _) in enumerate(drafts, start=1):
        expected += s
        if (rate := expected / (verify[n] + spent)) > best:
            best, taken = rate, n
    depths = [0] * len(ladders)
    for _, row in drafts[:taken]:
        depths[row] += 1
    return depths


def few_shapes(num_rows: int, ladders: Ladders, costs: Costs, depths: range) -> list[Shape]:
    """The best shape of each of these depths, one draft after the other; none where no draft can be right."""
    drafts = [(s, row, place) for row, own in enumerate(ladders) for place, s in enumerate(own) if s > 0.0]
    drafts.sort(key=_surest)  # stable: of equal chances the shallower draft comes first
    return [_few_to(num_rows, len(ladders), drafts, costs, depth) for depth in depths] if drafts else []


def _surest(draft: tuple[float, int, int]) -> float:
    return -draft[0]


def _few_to(num_rows: int, size: int, drafts: Sequence[tuple[float, int, int]], costs: Costs, depth: int) -> Shape:
    """The best prefix of the drafts that are no deeper than this."""
    verify, drafting, passes, spent = costs.verify, costs.drafting, [0] * depth, costs.opening
    if drafting is not None:
        spent += depth * drafting[0]
    expected, taken, best = 0.0, 0, (-1.0, 0.0, 0.0, 0)
    rows: list[int] = []
    for s, row, place in drafts:
        if place >= depth:
            continue
        expected += s
        taken += 1
        rows.append(row)
        if drafting is not None:
            spent += drafting[passes[place] + 1] - drafting[passes[place]]
            passes[place] += 1
        seconds = verify[taken] + spent
        rate = (num_rows + expected) / seconds
        if rate > best[0]:
            best = (rate, expected, seconds, taken)
    rate, expected, seconds, taken = best
    chosen = [0] * size
    for row in rows[:taken]:
        chosen[row] += 1
    return Shape(tuple(chosen), expected, seconds, rate)


def many_shapes(num_rows: int, ladders: Ladders, costs: Costs, depths: range) -> list[Shape]:
    """The same as `few_shapes`, for many drafts, in a few array operations."""
    rows, deepest = len(ladders), depths[-1]
    verify, chance = np.array(costs.verify), np.zeros(rows * deepest)
    for r, own in enumerate(ladders):
        chance[r * deepest : r * deepest + len(own)] = own
    order = np.argsort(-chance, kind="stable")
    order = order[chance[order] > 0.0]
    if not order.size:
        return []
    place, row = order % deepest, order // deepest
    is_in = place[None, :] < np.array(depths)[:, None]  # [D, N] the draft is part of the search at this depth
    expected = np.cumsum(chance[order] * is_in, axis=1)
    taken = np.cumsum(is_in, axis=1)
    seconds = verify[taken] + costs.opening
    if costs.drafting is not None:
        passed = np.cumsum(place[None, :] == np.arange(deepest)[:, None], axis=1)  # [K, N] rows in each pass
        seconds = seconds + np.cumsum(np.array(costs.drafting)[passed], axis=0)
    rates = np.where(is_in, (num_rows + expected) / seconds, -1.0)
    shapes = []
    for d, n in enumerate(rates.argmax(axis=1)):
        chosen = np.bincount(row[: n + 1][is_in[d, : n + 1]], minlength=rows)
        shapes.append(Shape(tuple(chosen.tolist()), float(expected[d, n]), float(seconds[d, n]), float(rates[d, n])))
    return shapes
