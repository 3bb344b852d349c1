"""Claims about the search: it is the optimum, and zero is one of its answers."""

from __future__ import annotations

import itertools
import random
from itertools import accumulate

import numpy as np
import pytest

from specdec.control.asking import ask_few, ask_many, net_gain, net_value
from specdec.control.beliefs import reached
from specdec.control.planning import Costs, best_shape, few_shapes, many_shapes, worthwhile


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
        costs = Costs(
            verify.tolist(),
            None if drafting is None else drafting.tolist(),
            0.0 if is_free else float(rng.choice([0.0, 0.2])),
        )
        num_rows = int(rows + rng.integers(0, 2))
        found = best_shape(num_rows, ladders.tolist(), costs)
        assert found.rate == pytest.approx(best_by_force(num_rows, ladders, costs))
        assert all(d <= (ladder > 0).sum() for d, ladder in zip(found.depths, ladders, strict=True))


def test_nothing_is_drafted_where_nothing_pays() -> None:
    """A draft that is right every other time and costs as much as a token of its own."""
    ladders = np.full((4, 1), 0.5)
    assert best_shape(4, ladders.tolist(), Costs([4.0, 5.0, 6.0, 7.0, 8.0])).num_drafts == 0
    assert best_shape(4, ladders.tolist(), Costs([4.0] * 5)).num_drafts == 4


def test_the_surest_rows_go_first() -> None:
    ladders = np.cumprod(np.array([[0.9] * 3, [0.2] * 3]), axis=1)
    costs = Costs([1.0, 1.1, 1.2, 1.3, 2.5, 3.0, 4.0])
    assert best_shape(2, ladders.tolist(), costs).depths == (3, 0)


def test_a_rows_limit_is_kept() -> None:
    ladders = np.array([[0.9, 0.8, 0.7], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0]])
    depths = best_shape(3, ladders.tolist(), Costs([1.0] * 10, [0.0] * 4)).depths
    assert depths == (3, 1, 0)


def test_rows_without_room_are_a_plain_step() -> None:
    assert best_shape(5, [], Costs([2.0])).rate == 2.5


def test_large_batches_are_planned() -> None:
    """256 rows, 8 deep."""
    rng = random.Random(0)
    ladders = np.cumprod(np.array([[rng.random() for _ in range(8)] for _ in range(256)]), axis=1)
    shape = best_shape(
        256, ladders.tolist(), Costs(np.linspace(1, 4, 2049).tolist(), np.linspace(0, 0.2, 257).tolist())
    )
    assert shape.num_drafts > 0


@pytest.mark.parametrize("is_free", [True, False])
def test_few_drafts_are_planned_as_many_are(is_free: bool) -> None:
    """300 random cases, rows of any depth, 0 among them; both forms find the same shapes."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        depths = [int(depth) for depth in rng.integers(0, 7, rng.integers(1, 9))]
        deepest = max(depths)
        if not deepest:
            continue
        ladders = [np.cumprod(rng.uniform(0, 1, depth) * (rng.random() > 0.2)).tolist() for depth in depths]
        verify = 1.0 + np.cumsum(rng.choice([0.0, 0.02, 0.3], sum(depths) + 1))
        drafting = [0.0, *np.cumsum(rng.random(len(depths))).tolist()]
        costs = Costs(verify.tolist(), None if is_free else drafting, 0.1)
        tried = range(deepest if is_free else 1, deepest + 1)
        few, many = (find(len(depths), ladders, costs, tried) for find in (few_shapes, many_shapes))
        assert [shape.depths for shape in few] == [shape.depths for shape in many]
        for one, other in zip(few, many, strict=True):
            assert (one.expected, one.seconds, one.rate) == pytest.approx((other.expected, other.seconds, other.rate))


def test_few_rows_are_asked_as_many_are() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        rows, deepest = rng.integers(1, 9, 2)
        value = rng.uniform(-0.2, 1.0, (rows, deepest)).round(1)  # so that some are alike
        drafting, rate = [0.0, *np.cumsum(rng.random(rows)).tolist()], float(rng.uniform(0.01, 1.0))
        few, many = (find(value, drafting, rate, 0.3) for find in (ask_few, ask_many))
        assert (few.rows, few.depth) == (many.rows, many.depth) and few.gain == pytest.approx(many.gain)


def test_one_offer_is_worth_what_it_is_among_cases() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        chances, extra = rng.uniform(0, 1, 6), [0.0, *np.cumsum(rng.uniform(0, 0.3, 6)).tolist()]
        assert net_gain(chances.tolist(), extra, 2.0) == pytest.approx(
            net_value(chances[None, None], extra, 2.0)[0, -1]
        )


def test_drafts_that_are_there_are_judged_as_the_whole_search_judges_them() -> None:
    """The short cut finds the depths of `best_shape` where some seconds are spent already, for few drafts and many."""
    rng = random.Random(11)
    for size in (1, 3, 8, 20):
        for _ in range(60):
            ladders = [reached([rng.random() for _ in range(rng.randint(0, 9))]) for _ in range(size)]
            verify = list(
                accumulate((rng.choice((0.0, 1e-4, 2e-3)) for _ in range(sum(map(len, ladders)))), initial=0.01)
            )
            whole = best_shape(size, ladders, Costs([seconds + 0.003 for seconds in verify]))
            assert tuple(worthwhile(size, ladders, verify, 0.003)) == whole.depths
