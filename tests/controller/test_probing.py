"""Claims about probing: what it costs is bounded, and less where it keeps finding nothing."""

from __future__ import annotations

import pytest

from specdec.control.probing import FEWEST_PLAIN, FEWEST_STEPS, MOST_PATIENCE, SHARE, YOUNG_SHARE, YOUNG_STEPS, Probes


def probes_of(steps: int, loss: float, num_accepted: int) -> list[int]:
    """Steps at which probes with drafts are made, where each finds so many right ones."""
    probes, made = Probes(), []
    for step in range(1, steps + 1):
        if probes.draft_is_due(step, loss):
            made.append(step)
            probes.found(num_accepted)
    return made


@pytest.mark.parametrize("loss", [0.1, 0.5, 3.0])
def test_probes_take_a_bounded_share_of_the_steps(loss: float) -> None:
    made = probes_of(3000, loss, 1)
    assert len(made) * loss <= SHARE * 3050 + YOUNG_SHARE * YOUNG_STEPS * 5 + 2 * loss
    assert len(made) > 5


def test_probes_that_find_nothing_become_rarer_until_one_finds_something() -> None:
    some, none = probes_of(3000, 0.1, 1), probes_of(3000, 0.1, 0)
    assert len(some) / MOST_PATIENCE <= len(none) + 2 < len(some) / 4
    probes = Probes()
    for _ in range(10):
        probes.found(0)
    assert probes.draft_is_due(10**6, 0.1) and not probes.draft_is_due(10**6 + 2 * FEWEST_STEPS, 0.1)
    probes.found(2)
    assert probes.draft_is_due(10**6 + 2 * FEWEST_STEPS + 20, 0.1)


def wait_for_plain(loss: float, *, was_seen: bool) -> int:
    """Steps until one without drafts is tried."""
    probes = Probes()
    if was_seen:
        probes.saw_plain(0, 1)
    return next(step for step in range(1, 3000) if probes.plain_is_due(step, 1, loss))


def test_a_plain_step_that_was_seen_is_tried_late_where_the_gain_is_large() -> None:
    """While young. What was never seen may cost less than is believed, however large the gain."""
    assert wait_for_plain(0.2, was_seen=True) < 30 and wait_for_plain(2.0, was_seen=False) < 60
    assert wait_for_plain(2.0, was_seen=True) > 200


def test_plain_steps_are_tried_seldom_however_small_the_gain() -> None:
    """A gain of 2 % would buy one in two steps while young; steps that have no offer are plain anyway."""
    probes, tried = Probes(), []
    for step in range(1, 500):
        if probes.plain_is_due(step, 8, 0.02):
            probes.saw_plain(step, 8)
            tried.append(step)
    assert 2 < len(tried) <= 500 // FEWEST_PLAIN + 1
