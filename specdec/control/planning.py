"""Planning: the draft depths that promise the most emitted tokens per second.

It knows ladders of chances and two tables of costs; it knows no requests, proposers or history. A
row's ladder is S(r, 1) >= S(r, 2) >= ..., the chances that its first i drafts are all accepted, so
inside a maximum depth the best set of n drafts is the n largest S, whatever the costs; what is left
to search is n and the depth, and both are tried in full, in a few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    verify: np.ndarray
    drafting: np.ndarray | None = None
    opening: float = 0.0


def best_shape(num_rows: int, ladders: np.ndarray, costs: Costs) -> Shape:
    """The best over all depths and sets of drafts, none at all included; the shallowest of equals.

    num_rows   rows that emit a token of their own; the ladders are of some or all of them
    ladders    [R, K]   S, 0 where a row may not go so deep
    """
    return max(shapes_by_depth(num_rows, ladders, costs), key=lambda shape: shape.rate)


def shapes_by_depth(num_rows: int, ladders: np.ndarray, costs: Costs) -> list[Shape]:
    """The best shape of every maximum depth, from 0 on; where drafting is free only of 0 and the deepest."""
    rows, deepest = ladders.shape
    verify = costs.verify
    plain = Shape((0,) * rows, 0.0, float(verify[0]), num_rows / float(verify[0]))
    chance = ladders.ravel()
    order = np.argsort(-chance, kind="stable")  # stable: of equal chances the shallower draft comes first
    order = order[chance[order] > 0.0]
    if not order.size:
        return [plain]
    place, row = order % deepest, order // deepest
    depths = np.array([deepest]) if costs.drafting is None else np.arange(1, deepest + 1)
    is_in = place[None, :] < depths[:, None]  # [D, N] the draft is part of the search at this depth
    expected = np.cumsum(chance[order] * is_in, axis=1)
    taken = np.cumsum(is_in, axis=1)
    seconds = verify[taken] + costs.opening
    if costs.drafting is not None:
        passed = np.cumsum(place[None, :] == np.arange(deepest)[:, None], axis=0 + 1)  # [K, N] rows in each pass
        seconds = seconds + np.cumsum(costs.drafting[passed], axis=0)
    rates = np.where(is_in, (num_rows + expected) / seconds, -1.0)
    best = rates.argmax(axis=1)
    shapes = [plain]
    for d, n in enumerate(best):
        chosen = np.bincount(row[: n + 1][is_in[d, : n + 1]], minlength=rows)
        shapes.append(Shape(tuple(chosen.tolist()), float(expected[d, n]), float(seconds[d, n]), float(rates[d, n])))
    return shapes
