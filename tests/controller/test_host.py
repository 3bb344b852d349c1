"""Claims about the host's time: it is measured where it is spent, and speculation that gains less is turned off."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evals.sim_run import SOURCE
from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, StepSeconds, Verdict
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.control.step_cost import Average
from specdec.controller import FixedLength
from tests.controller.test_adaptive import decoding
from tests.engines import ids, llm

K = 3


def share_with_room(host: float, looking: float, offered: float, *, chance: float = 0.6, steps: int = 600) -> float:
    """Of the last half of the steps of one long request: where it might draft. A forward takes 10 ms, a draft 0.5 ms.

    host, looking   seconds of the controller and of the proposer in a step that may draft
    offered         how often there is an offer, of drafts that are right with one chance
    """
    rng = random.Random(7)
    controller = AdaptiveLength(FixedLength(K, None), Sources(free=(SOURCE,)), ForwardCost(64, {1: 0.01, 9: 0.014}))
    request, found = decoding("r", most=10**6), []
    for _ in range(steps):
        controller.prepare([request], [])
        room = controller.budget(request)
        plan = Plan((Row(request, request.num_tokens - 1, 1, room),))
        offer = Offer((1,) * room, SOURCE) if room and rng.random() < offered else NO_OFFER
        batch = controller.admit(plan, Drafts((offer,)))
        drafted = batch.num_tokens - 1
        accepted = next((j for j in range(drafted) if rng.random() > chance), drafted)
        verdict = Verdict(((1,) * (accepted + 1),), (False,))
        is_on = bool(room)
        seconds = StepSeconds(is_on * looking, 0.01 + 0.0005 * drafted, is_on * host)
        controller.observe(batch, verdict, seconds)
        found.append(is_on)
    return sum(found[steps // 2 :]) / (steps - steps // 2)


def test_what_the_host_takes_is_weighed_against_what_drafts_gain() -> None:
    """Offers in every step gain about 0.8 tokens for 1.5 ms: worth 1 ms of the host's, but not 20 ms."""
    assert share_with_room(0.0, 0.0, 1.0) > 0.9
    assert share_with_room(0.0005, 0.0005, 1.0) > 0.9
    assert share_with_room(0.02, 0.0, 1.0) < 0.1
    assert share_with_room(0.0, 0.02, 1.0) < 0.1


def test_seldom_offers_are_not_worth_looking_for_where_looking_is_dear() -> None:
    """The same 1.5 ms of the host: one step in twenty has an offer, or every one."""
    assert share_with_room(0.001, 0.0005, 0.05) < 0.2
    assert share_with_room(0.001, 0.0005, 1.0) > 0.9
    assert share_with_room(0.0, 0.0, 0.05) > 0.5  # where looking is free, seldom is good enough


def test_an_average_is_not_misled_by_cold_starts_and_outliers() -> None:
    average = Average()
    for index in range(200):
        average.add(0.1 if index == 0 else 0.05 if index % 50 == 49 else 0.0001)
    assert 0.0001 <= average.value < 0.0003
    for _ in range(200):
        average.add(0.001)
    assert average.value == pytest.approx(0.001, rel=0.05)


class _Listener(FixedLength):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(0, None)
        self.heard: list[StepSeconds] = []

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        self.heard.append(replace(seconds))


def test_the_engine_tells_what_its_controller_and_what_follows_the_verdict_took(toy: str) -> None:
    made = llm(toy)
    kept, listener = made.engine.controller, _Listener()
    made.engine.controller = listener
    try:
        ids(made, [[65, 66, 67]], max_tokens=8)
    finally:
        made.engine.controller = kept
    assert len(listener.heard) == 8
    for seconds in listener.heard:
        assert 0.0 < seconds.host < 0.05 and 0.0 < seconds.follow < 0.05
        assert seconds.verify > seconds.follow
