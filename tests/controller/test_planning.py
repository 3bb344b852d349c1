"""Claims about the search: it is the optimum, and zero is one of its answers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from specdec.control.planning import Costs, best_shape


def best_by_force(num_rows: int, ladders: np.ndarray, costs: Costs) -> float:
    """The best rate over every combination of depths."""
    best = 0.0
    for depths in itertools.product(*(range(int((ladder > 0).sum()) + 1) for ladder in ladders)):
        expected = sum(ladders[r, :d].sum() for r, d in enumerate(depths))
        seconds = costs.verify[sum(depths)]
        if any(depths):
            seconds = seconds + costs.opening
            if costs.drafting is not None:
                seconds = seconds + sum(costs.drafting[sum(d > j for d in depths)] for j in range(max(depths)))
        best = max(best, (num_rows + expected) / seconds)
    return best


@pytest.mark.parametrize("is_free", [True, False])
def test_it_is_the_optimum(is_free: bool) -> None:
    """300 random cases against every combination of depths; costs are monotone with shelves."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows, deepest = rng.integers(1, 4), rng.integers(1, 4)
        ladders = np.cumprod(rng.uniform(0, 1, (rows, deepest)), axis=1)
        ladders[np.arange(deepest)[None] >= rng.integers(0, deepest + 1, rows)[:, None]] = 0.0
        verify = 1.0 + np.cumsum(rng.choice([0.0, 0.02, 0.3], rows * deepest + 1))
        drafting = None if is_free else np.cumsum(rng.uniform(0, 0.1, rows + 1)) + 0.1
        costs = Costs(verify, drafting, 0.0 if is_free else float(rng.choice([0.0, 0.2])))
        num_rows = int(rows + rng.integers(0, 2))
        found = best_shape(num_rows, ladders.tolist(), costs)
        assert found.rate == pytest.approx(best_by_force(num_rows, ladders, costs))
        assert all(d <= (ladder > 0).sum() for d, ladder in zip(found.depths, ladders, strict=True))


def test_nothing_is_drafted_where_nothing_pays() -> None:
    """A draft that is right every other time and costs as much as a token of its own."""
    ladders = np.full((4, 1), 0.5)
    assert best_shape(4, ladders.tolist(), Costs(np.arange(4, 9) * 1.0)).num_drafts == 0
    assert best_shape(4, ladders.tolist(), Costs(np.full(5, 4.0))).num_drafts == 4


def test_the_surest_rows_go_first() -> None:
    ladders = np.cumprod(np.array([[0.9] * 3, [0.2] * 3]), axis=1)
    costs = Costs(np.array([1.0, 1.1, 1.2, 1.3, 2.5, 3.0, 4.0]))
    assert best_shape(2, ladders.tolist(), costs).depths == (3, 0)


def test_a_rows_limit_is_kept() -> None:
    ladders = np.array([[0.9, 0.8, 0.7], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0]])
    depths = best_shape(3, ladders.tolist(), Costs(np.full(10, 1.0), np.zeros(4))).depths
    assert depths == (3, 1, 0)


def test_rows_without_room_are_a_plain_step() -> None:
    assert best_shape(5, [], Costs(np.array([2.0]))).rate == 2.5


def test_large_batches_are_planned() -> None:
    """256 rows, 8 deep."""
    rng = random.Random(0)
    ladders = np.cumprod(np.array([[rng.random() for _ in range(8)] for _ in range(256)]), axis=1)
    shape = best_shape(256, ladders.tolist(), Costs(np.linspace(1, 4, 2049), np.linspace(0, 0.2, 257)))
    assert shape.num_drafts > 0
