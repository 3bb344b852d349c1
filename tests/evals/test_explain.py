"""Calibration is told apart from the scatter that few drafts show by themselves."""

from __future__ import annotations

import random

import pytest

from evals import explain
from evals.lookup import believed
from specdec.proposers.ngram import NgramProposer


def drawn(count: int, hoped: float = 0.0) -> list[tuple[float, bool]]:
    """Drafts whose believed chance is true, or too high by `hoped`."""
    rng = random.Random(count)
    chances = [rng.uniform(0.1, 0.8) for _ in range(count)]
    return [(chance + hoped, rng.random() < chance) for chance in chances]


@pytest.mark.parametrize("count", [50, 5000])
def test_faultless_beliefs_show_what_chance_makes_of_them(count: int) -> None:
    """With 50 drafts that is above 0.1, and says nothing; with 5000 it is about 0.01."""
    judged = drawn(count)
    assert 0.4 < explain.calibration_error(judged) / explain.chance_error(judged) < 1.8
    assert (explain.chance_error(judged) > 0.1) == (count == 50)


def test_hope_shows_as_bias() -> None:
    """Negative control."""
    judged = drawn(5000, hoped=0.1)
    assert explain.calibration_error(judged) > 5 * explain.chance_error(judged)
    assert "bias +0.1" in explain.calibration(judged) or "bias +0.09" in explain.calibration(judged)


def test_forced_drafts_are_not_counted_as_beliefs() -> None:
    row = {"chances": [1.0, 0.5, 0.4], "accepted": 1}
    assert explain.beliefs([{"rows": [row]}]) == [(0.5, False)]
    assert explain.calibration([]) == "no drafts were judged"


def test_answers_are_replayed_through_the_controllers_estimate() -> None:
    """An answer that repeats itself: look-up is always right, and soon believed."""
    answers = [{"prompt": [1, 2, 3, 4, 5], "answer": [1, 2, 3, 4, 5] * 12} for _ in range(3)]
    judged = believed(NgramProposer(2, 4), answers, 4, 0.0)
    assert len(judged) > 100 and all(is_right for _, is_right in judged)
    assert judged[0][0] < 0.75 < 0.95 < judged[-1][0]
    assert believed(NgramProposer(2, 4), answers, 4, 2.0) == []  # nothing is likely enough
