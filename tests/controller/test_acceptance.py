"""Claims about the acceptance estimates: calibrated, quick, forgetful, and better with confidences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from specdec.control.acceptance import Acceptance, Ask, Outcome
from tests.controller.array_acceptance import WIDTH, ArrayAcceptance

SOURCE = "someone"


def ask(acceptance: Acceptance, name: str, depth: int = 1, step: int = 0, conf: tuple[float, ...] = ()) -> list[float]:
    return [float(c) for c in acceptance.chances([Ask(name, SOURCE, depth, conf)], step)[0]]


def draw(rng: random.Random, chances: list[float]) -> int:
    """How many drafts are right before the first wrong one."""
    accepted = 0
    while accepted < len(chances) and rng.random() < chances[accepted]:
        accepted += 1
    return accepted


def calibration_error(believe: Callable[[float], float]) -> float:
    """Mean distance of belief and truth by tenths of the belief, over 300 requests of three kinds, 30 steps each.

    Twenty run at a time. The controller is asked before it hears; `believe` may replace what it says.
    """
    rng, acceptance = random.Random(1), Acceptance()
    pairs: list[tuple[float, bool]] = []
    for group in range(15):
        kinds = [rng.choice([0.1, 0.6, 0.95]) for _ in range(20)]
        for step in range(30 * group, 30 * group + 30):
            names = [f"{group}-{r}" for r in range(20)]
            said = acceptance.chances([Ask(name, SOURCE, 3) for name in names], step)
            outcomes = []
            for r, name in enumerate(names):
                accepted = draw(rng, [min(kinds[r] * 1.02**j, 0.97) for j in range(3)])
                pairs += [(believe(float(said[r, j])), j < accepted) for j in range(min(accepted + 1, 3))]
                outcomes.append(Outcome(name, SOURCE, 3, accepted))
            acceptance.learn(outcomes, step)
    beliefs, right = np.array([p for p, _ in pairs]), np.array([r for _, r in pairs])
    tenths = np.minimum((beliefs * 10).astype(int), 9)
    return sum(abs(beliefs[tenths == b].mean() - right[tenths == b].mean()) * (tenths == b).mean() for b in set(tenths))


def test_beliefs_are_calibrated() -> None:
    """15,000 judged drafts; a tenth of them wanders by under 0.03 (three deviations), so 0.07 is not met by luck."""
    assert calibration_error(lambda said: said) < 0.07


def test_a_belief_that_is_off_is_found_out() -> None:
    """Negative control."""
    assert calibration_error(lambda said: said**3) > 0.1


def test_a_new_request_starts_from_the_prior_of_its_proposer() -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    start = ask(acceptance, "new")[0]
    for step in range(200):
        for r in range(4):
            acceptance.learn([Outcome(f"{r}", SOURCE, 1, int(rng.random() < 0.9))], step)
    assert ask(acceptance, "new", step=200)[0] > start + 0.15
    other = acceptance.chances([Ask("new", "another", 1)], 200)[0, 0]
    assert other == pytest.approx(start)


def test_a_request_is_known_after_a_dozen_outcomes_and_known_anew_when_it_changes() -> None:
    acceptance = Acceptance()
    for step in range(12):
        acceptance.learn([Outcome("good", SOURCE, 2, 2), Outcome("bad", SOURCE, 2, 0)], step)
    assert ask(acceptance, "good", step=12)[0] > 0.75 and ask(acceptance, "bad", step=12)[0] < 0.25
    for step in range(12, 42):
        acceptance.learn([Outcome("good", SOURCE, 2, 0)], step)
    assert ask(acceptance, "good", step=42)[0] < 0.25


def test_what_was_not_tried_for_long_is_tried_again() -> None:
    """A request that was refused drifts back to the prior of all, so it is not refused for ever."""
    acceptance = Acceptance()
    for step in range(300):
        acceptance.learn([Outcome("steady", SOURCE, 1, 1), Outcome("odd", SOURCE, 1, 0)][: 1 + (step < 20)], step)
    soon, late = ask(acceptance, "odd", step=20)[0], ask(acceptance, "odd", step=299)[0]
    assert late > soon + 0.2


def log_loss(with_confidences: bool) -> float:
    """Of requests whose proposer knows when it is right; ten at a time, the first third not counted."""
    rng, acceptance, losses = random.Random(2), Acceptance(), []
    for step in range(150):
        chances = [rng.choice([0.1, 0.9]) for _ in range(10)]
        confs = [(0.7 if c > 0.5 else 0.4,) for c in chances]  # in the right order, but not chances
        asks = [Ask(str(r), SOURCE, 1, confs[r] if with_confidences else ()) for r in range(10)]
        said = acceptance.chances(asks, step)[:, 0]
        right = [rng.random() < c for c in chances]
        losses += [-float(np.log(s if y else 1.0 - s)) for s, y in zip(said, right, strict=True)]
        acceptance.learn([Outcome(str(r), SOURCE, 1, int(right[r]), confs[r]) for r in range(10)], step)
    return float(np.mean(losses[500:]))


def test_confidences_are_fitted_and_help() -> None:
    """The best is 0.325 nats, coin tosses are 0.693."""
    assert log_loss(True) < 0.45 < 0.65 < log_loss(False)


def test_requests_that_are_gone_are_forgotten() -> None:
    acceptance = Acceptance()
    acceptance.learn([Outcome(str(r), SOURCE, 1, 1) for r in range(5)], 0)
    acceptance.keep({"1", "2"})
    assert acceptance.num_requests == 2


def test_forced_drafts_are_certain_and_teach_nothing() -> None:
    """A grammar forces every other draft; the guesses between them are right one time in ten."""
    rng, acceptance, alone = random.Random(4), Acceptance(), Acceptance()
    certain = (True, False, True, False)
    for step in range(200):
        accepted = next((j for j in range(4) if not certain[j] and rng.random() > 0.1), 4)
        acceptance.learn([Outcome("r", SOURCE, 4, accepted, certain=certain)], step)
        acceptance.learn([Outcome("f", "grammar", 3, 3, certain=(True,) * 3)], step)
        alone.learn([Outcome("r", SOURCE, 4, accepted)], step)  # as if nobody knew: negative control
    said = acceptance.chances([Ask("r", SOURCE, 4, certain=certain), Ask("f", "grammar", 3, certain=(True,) * 3)], 200)
    assert said[0, 0] == said[0, 2] == 1.0 and said[0, 1] < 0.25
    assert said[1].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert ask(acceptance, "r", 2, 200)[1] < 0.25 < ask(alone, "r", 1, 200)[0] < 1.0
    assert ask(acceptance, "f", 1, 200) == ask(Acceptance(), "f", 1, 200)  # nothing is known of its guesses


def test_one_float_at_a_time_finds_what_arrays_find() -> None:
    """600 steps of up to nine rows, three sources, one without confidences; some drafts are forced."""
    rng, quick, slow, step = random.Random(5), Acceptance(), ArrayAcceptance(), 0
    for _ in range(600):
        step += 1 if rng.random() < 0.9 else 6
        asks, outcomes = [], []
        for name in map(str, rng.sample(range(12), rng.randint(1, 9))):
            depth, source = rng.randint(1, WIDTH), rng.choice("xyz")
            confidences = tuple(rng.random() for _ in range(depth)) if source != "z" else ()
            certain = tuple(rng.random() < 0.2 for _ in range(depth)) if rng.random() < 0.2 else ()
            asks.append(Ask(name, source, depth, confidences, certain))
            outcomes.append(Outcome(name, source, depth, rng.randint(0, depth), confidences, certain))
        said = quick.chances(asks, step)
        assert said == pytest.approx(slow.chances(asks, step)[:, : said.shape[1]], abs=1e-9)
        quick.learn(outcomes, step)
        slow.learn(outcomes, step)


def test_cases_are_what_would_be_said_of_offers_like_the_last() -> None:
    """Each row in each case: the chances of an offer with those confidences, the last one going on behind its end."""
    acceptance, said = Acceptance(), [(0.2,), (0.9, 0.8, 0.7), (0.5,) * 10]
    for step, confidences in enumerate(said):
        acceptance.learn([Outcome("a", SOURCE, 1, step % 2, confidences[:1])], step)
    acceptance.note([Ask("a", SOURCE, len(c), c) for c in said])
    for depth in (2, 7, 12):
        found = acceptance.cases(["a", "b"], SOURCE, depth, 9)
        for r, name in enumerate(("a", "b")):
            for s, confidences in enumerate(said):
                padded = (*confidences, *[confidences[-1]] * depth)[:depth]
                assert found[r, s].tolist() == pytest.approx(ask(acceptance, name, depth, 9, padded))


def test_a_new_request_of_an_old_name_is_new() -> None:
    acceptance = Acceptance()
    for step in range(20):
        acceptance.learn([Outcome("r", SOURCE, 1, 0, (0.5,)), Outcome("other", SOURCE, 1, 1, (0.5,))], step)
    known = ask(acceptance, "r", step=20)
    acceptance.forget("r")
    assert ask(acceptance, "r", step=20)[0] == ask(acceptance, "new", step=20)[0] > known[0] + 0.1


def test_drafts_of_one_request_stand_or_fall_together() -> None:
    """Half the requests are easy and half are hard: all four drafts are right far more often than chances that are
    multiplied say, and that is known of a request of which nothing is known."""
    rng, acceptance = random.Random(3), Acceptance()
    for request in range(400):
        chance = rng.choice((0.25, 0.95))
        for step in range(4):
            accepted = next((j for j in range(4) if rng.random() > chance), 4)
            acceptance.learn([Outcome(str(request), SOURCE, 4, accepted, (0.7,) * 4)], 4 * request + step)
    said = acceptance.of(Ask("new", SOURCE, 4, (0.7,) * 4), 1600)
    real = (0.25**4 + 0.95**4) / 2
    assert math.prod(said) == pytest.approx(real, abs=0.12)
    assert said[0] ** 4 < real - 0.15  # negative control
