"""Claims about the cost model: monotone, shelved, robust, and quick to unlearn a wrong seed."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from specdec.control.cost import ForwardCost, make_grid


def machine(tokens: int) -> float:
    """15 ms for one token, with a shelf up to 16 and 2 ms a token behind it."""
    return 0.015 + 0.0003 * min(tokens, 16) + 0.002 * max(tokens - 16, 0)


SEED = {n: machine(n) for n in (1, 4, 8, 16, 32, 64, 128, 256)}


def worst(cost: ForwardCost, sizes: tuple[int, ...]) -> float:
    return max(abs(math.log(cost.at(n) / machine(n))) for n in sizes)


def test_the_seed_is_believed_and_the_curve_is_monotone_whatever_is_seen() -> None:
    cost, rng = ForwardCost(512, SEED), random.Random(0)
    assert worst(cost, tuple(SEED)) < 1e-9
    for _ in range(200):
        cost.observe([rng.randint(1, 300)], 0.01 * math.exp(rng.gauss(0, 1)))
    curve = cost.span(1, 512)
    assert (np.diff(curve) >= -1e-12).all() and cost.at(2000) > cost.at(1000) > curve[-1] and cost.at(0) == 0


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_seed_that_is_wrong_where_drafts_are_priced_is_unlearned_in_200_steps(factor: float) -> None:
    """Tokens beyond 8 are three times as dear, or as cheap, as the seed says; noise of 5 % a step."""
    wrong = {n: s * (factor if n > 8 else 1.0) for n, s in SEED.items()}
    cost, rng = ForwardCost(512, wrong), random.Random(1)
    assert worst(cost, (32, 64)) > 1.0
    for _ in range(200):
        tokens = rng.choice((4, 8, 12, 32, 64))
        cost.observe([tokens], machine(tokens) * math.exp(rng.gauss(0, 0.05)))
    assert worst(cost, (4, 8, 12, 32, 64)) < 0.1


def test_a_shelf_is_found() -> None:
    cost, rng = ForwardCost(512), random.Random(2)
    for _ in range(400):
        tokens = rng.randint(1, 48)
        cost.observe([tokens], machine(tokens) * math.exp(rng.gauss(0, 0.03)))
    assert cost.at(15) - cost.at(8) < 0.004 and cost.at(40) - cost.at(20) > 0.03


def test_outliers_and_slow_first_steps_leave_little() -> None:
    cost, rng = ForwardCost(512, SEED), random.Random(3)
    cost.observe([8], 20 * machine(8))  # a first step that compiles
    for step in range(150):
        tokens = rng.choice((1, 8, 32))
        cost.observe([tokens], machine(tokens) * (10.0 if step % 15 == 14 else 1.0))
    assert worst(cost, (1, 8, 32)) < 0.12


def test_a_machine_that_becomes_busy_is_followed_and_its_shape_kept() -> None:
    cost = ForwardCost(512, SEED)
    for _ in range(60):
        cost.observe([8], machine(8))
    for _ in range(40):
        cost.observe([8], 2 * machine(8))
    assert cost.at(8) == pytest.approx(2 * machine(8), rel=0.1)
    assert cost.at(64) / cost.at(8) == pytest.approx(machine(64) / machine(8), rel=0.25)


def test_context_and_prompts_are_told_apart_from_tokens() -> None:
    cost, rng = ForwardCost(512, SEED), random.Random(4)

    def real(tokens: int, keys: int, prompts: int) -> float:
        return machine(tokens) + 2e-6 * keys - 2e-4 * prompts

    for _ in range(600):
        tokens, keys, prompts = rng.choice((1, 8, 32)), rng.randint(0, 8000), rng.choice((0, 64))
        cost.observe([tokens + prompts], real(tokens + prompts, keys, prompts), keys, prompts)
    assert cost.seconds(8, 8000) - cost.seconds(8, 0) == pytest.approx(0.016, rel=0.3)
    assert cost.seconds(72, 0, 64) == pytest.approx(real(72, 0, 64), rel=0.1)


def test_passes_of_a_draft_are_told_apart_from_their_sum() -> None:
    cost, rng = ForwardCost(512), random.Random(5)
    for _ in range(300):
        sizes = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
        cost.observe(sizes, sum(machine(n) for n in sizes))
    assert worst(cost, (4, 16, 32)) < 0.15


def test_the_grid_covers_what_a_step_may_hold() -> None:
    assert make_grid(512)[-1] == 512 and make_grid(1)[-1] == 8
    assert max(b / a for a, b in zip(make_grid(4096)[7:], make_grid(4096)[8:], strict=False)) <= 1.25
