"""Claims about the host's time: it is measured where it is spent, and speculation that gains less is turned off."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from evals import controller_cost, results
from evals.sim_run import SOURCE
from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, StepSeconds, Verdict
from specdec.control.acceptance import Acceptance, Outcome
from specdec.control.adaptive import KEPT_STEPS, AdaptiveLength
from specdec.control.beliefs import BEFORE_STEPS, Beliefs, Heard
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.control.step_cost import Average
from specdec.controller import FixedLength
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from tests.controller.test_adaptive import decoding
from tests.engines import ids, llm

K = 3


def share_with_room(
    host: float,
    looking: float,
    offered: float,
    *,
    chance: float = 0.6,
    steps: int = 600,
    rest: float = 0.0,
    more_rest: float = 0.0,
    probe_host: float = 0.0,
) -> float:
    """Of the last half of the steps of one long request: where it might draft. A forward takes 10 ms, a draft 0.5 ms.

    host, looking   seconds of the controller and of the proposer in a step that may draft
    offered         how often there is an offer, of drafts that are right with one chance
    rest            seconds between two steps; more_rest: more behind one that may draft
    probe_host      as host, in a step without drafts that was planned among others with them
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
        own = is_on * host + (controller._kind == "plain probe") * probe_host
        seconds = StepSeconds(is_on * looking, 0.01 + 0.0005 * drafted, own, 0.0, rest + is_on * more_rest)
        controller.observe(batch, verdict, seconds)
        found.append(is_on)
    return sum(found[steps // 2 :]) / (steps - steps // 2)


def test_what_the_host_takes_is_weighed_against_what_drafts_gain() -> None:
    """Offers in every step gain about 0.8 tokens for 1.5 ms: worth 1 ms of the host's, but not 20 ms."""
    assert share_with_room(0.0, 0.0, 1.0) > 0.9
    assert share_with_room(0.0005, 0.0005, 1.0) > 0.9
    assert share_with_room(0.02, 0.0, 1.0) < 0.1
    assert share_with_room(0.0, 0.02, 1.0) < 0.1


def test_what_the_host_takes_without_drafts_is_heard_where_they_are_off() -> None:
    """A plain step among drafting ones is planned like them, and is no measure of what planning takes."""
    assert share_with_room(0.02, 0.0, 1.0, probe_host=0.02) < 0.1
    assert share_with_room(0.0005, 0.0, 1.0, probe_host=0.0005) > 0.9


def test_what_lies_between_two_steps_is_saved_by_drafts_that_are_right() -> None:
    """20 ms of the host that 10 ms cannot pay for, 50 ms more between any two steps can; not what drafts add there."""
    assert share_with_room(0.02, 0.0, 1.0, rest=0.05) > 0.9
    assert share_with_room(0.0, 0.0, 1.0, rest=0.001) > 0.9
    assert share_with_room(0.0, 0.0, 1.0, rest=0.001, more_rest=0.04) < 0.1


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
    assert listener.heard[0].rest == 0.0 and all(0.0 < seconds.rest < 0.05 for seconds in listener.heard[2:])
    for seconds in listener.heard:
        assert 0.0 < seconds.host < 0.05 and 0.0 < seconds.follow < 0.05
        assert seconds.verify > seconds.follow


def test_what_is_remembered_of_an_offer_is_what_would_be_said_anew() -> None:
    """Two requests share an offer; rows leave less room later, then more; a step later it is asked again."""
    acceptance = Acceptance()
    for step in range(30):
        acceptance.learn([Outcome("a", SOURCE, 4, 4, (0.8,) * 4), Outcome("b", SOURCE, 4, 0, (0.8,) * 4)], step)
    offer, beliefs = Offer((1,) * 6, SOURCE, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)), Beliefs(acceptance, looks=True)
    for step in (31, 32):
        for name in "abab":
            for room in (4, 2, 6, 3):
                row = Row(decoding(name), 9, 1, room)
                fresh = Beliefs(acceptance, looks=True).of(row, offer, step)
                assert beliefs.of(row, offer, step) == fresh and len(fresh) == room
                expected = sum(math.prod(fresh[: j + 1]) for j in range(room))
                assert beliefs.expected(row, offer, step) == pytest.approx(expected)
        acceptance.learn([Outcome("a", SOURCE, 1, 0, (0.8,))], step)


def test_how_often_a_request_is_offered_something_is_learned_for_each() -> None:
    heard, row = Heard(), Row(decoding("often"), 9, 1, 3)
    assert heard.share("new") == 1.0
    for step in range(40):
        rows = [row, Row(decoding("seldom"), 9, 1, 3), Row(decoding("no room"), 9, 1, 0)]
        heard.note(rows, [Offer((1,), SOURCE), Offer((1,), SOURCE) if step % 10 == 0 else NO_OFFER, NO_OFFER])
    assert heard.share("often") > 0.8 and heard.share("seldom") < 0.35
    assert 0.4 < heard.share("no room") < 0.7  # as all others
    heard.forget("often")
    assert heard.share("often") == heard.share("new")


def test_the_eval_of_the_controllers_cost_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.jsonl"
    assert controller_cost.main(["--rows", "1,3", "--steps", "20", "--out", str(out)]) == 0
    found = list(results.read(out))
    assert [(one["method"], one["rows"]) for one in found] == [(m, r) for m in controller_cost.METHODS for r in (1, 3)]
    assert all(0 < one["by_verb"]["prepare"] < one["total"] < 1e5 and one["drafts"] > 0 for one in found)
    assert "observe" in capsys.readouterr().out


def test_what_is_thought_of_a_request_before_offers_is_at_most_a_few_steps_old() -> None:
    """Planning beside a load that jumps asks anew every few steps, and for every new request of an old name."""
    controller = AdaptiveLength(FixedLength(K, None), Sources(free=(SOURCE,)), ForwardCost(64, {1: 0.01, 9: 0.014}))
    request, asked = decoding("r", most=10**6), []
    ask = controller.acceptance.of
    controller.acceptance.of = lambda *of: asked.append(of[0].request_id) or ask(*of)  # type: ignore[method-assign]
    for step in range(1, 41):
        others = [decoding(f"other {step}-{i}", most=10**6) for i in range(1 + 2 * (step % 2))]
        controller.prepare([request, *others], [])
    assert 40 / BEFORE_STEPS <= asked.count("r") <= 40 / BEFORE_STEPS + 2
    asked.clear()
    anew = decoding("r", most=10**6)
    anew.token_ids.append(1)
    anew.num_computed_tokens += 1
    controller.prepare([anew, *(decoding(f"other 41-{i}", most=10**6) for i in range(3))], [])
    assert asked.count("r") == 1


def test_a_plan_that_leaves_the_depths_to_the_offers_serves_while_others_come_and_go() -> None:
    """It is made anew every few steps, and at once where the load changes; who is new has room in any case."""
    sources = Sources(free=(SOURCE,))
    controller = AdaptiveLength(FixedLength(K, None), sources, ForwardCost(64, {1: 0.01, 64: 0.011}), most_tokens=64)
    controller.probes.plain_is_due = lambda *of: False  # type: ignore[method-assign]
    plan, planned = controller._plan, []
    controller._plan = lambda *of: planned.append(controller.step) or plan(*of)  # type: ignore[method-assign]
    for step in range(1, 41):
        running = [decoding("r", most=10**6), *(decoding(f"{step}-{i}", most=10**6) for i in range(7))]
        controller.prepare(running, [])
        assert [controller.budget(request) for request in running] == [K] * 8
    assert planned == list(range(1, 41, KEPT_STEPS))
    controller._kept.until = controller.step + 4
    controller.prepare(running[:4], [])
    assert planned[-1] == controller.step
    owing = Request("long", [1] * 500, SamplingParams(max_tokens=4), max_output_tokens=4)
    controller.prepare([*running, owing], [])
    rooms = [controller.budget(request) for request in running]
    assert rooms == [64 // 3 // 8] * 8  # a prompt that wants all of the step leaves a third of it to drafts
