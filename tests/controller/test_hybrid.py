"""Claims about the controller as the hybrid's policy: who drafts for a row, and that the text stays the target's."""

from __future__ import annotations

from dataclasses import replace

import specdec
from specdec.batch import NO_OFFER, Offer, Row
from specdec.control.acceptance import Ask, Outcome
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.controller import FixedLength
from specdec.llm import LLM
from specdec.proposers.hybrid import HybridProposer
from tests.controller.test_adaptive import decoding
from tests.engines import assert_clean, ids, llm

PROMPTS = [[65, 66, 67, 65, 66], [70, 71, 72, 73], [80, 81, 80, 81, 80, 81]]


def policy(free_is_right: bool, draft_seconds: float = 0.0005) -> AdaptiveLength:
    """A controller that has seen the model to be right, and the free proposer to be so or not, for one request."""
    sources = Sources(free=("lookup",), costly="model")
    draft = ForwardCost(512, {1: draft_seconds, 512: 2 * draft_seconds})
    controller = AdaptiveLength(FixedLength(4, None), sources, ForwardCost(512, {1: 0.01, 512: 0.02}), draft)
    controller.probes.plain_is_due = lambda *_: False  # type: ignore[method-assign]
    controller.probes.model_is_due = lambda *_: False  # type: ignore[method-assign]
    for step in range(30):
        controller.acceptance.learn([Outcome(f"a{step}", "model", 4, 4)], step)
        controller.acceptance.learn([Outcome(f"b{step}", "lookup", 4, 4 if free_is_right else 0)], step)
    controller.step = 30
    return controller


def asked(controller: AdaptiveLength, free: Offer) -> int:
    """Drafts the model is asked for."""
    request = decoding("r")
    controller.prepare([request], [])
    row = Row(request, 9, 1, controller.budget(request))
    return controller.model_depths([row], [free])[0]


LOOKUP = Offer((1, 2, 3, 4), "lookup")


def test_the_model_is_asked_where_nothing_is_free_or_what_is_free_is_wrong() -> None:
    assert asked(policy(free_is_right=False), NO_OFFER) == 4
    assert asked(policy(free_is_right=False), LOOKUP) == 4
    assert asked(policy(free_is_right=True), LOOKUP) == 0


def test_the_model_is_not_asked_where_its_passes_cost_more_than_they_bring() -> None:
    assert asked(policy(free_is_right=False, draft_seconds=1.0), NO_OFFER) == 0


def test_the_model_is_asked_for_the_rows_it_serves_only() -> None:
    """One row has a good free offer, one has none; passes over one row are what is paid."""
    controller = policy(free_is_right=True)
    requests = [decoding("a"), decoding("b")]
    controller.prepare(requests, [])
    rows = [Row(request, 9, 1, controller.budget(request)) for request in requests]
    assert list(controller.model_depths(rows, [LOOKUP, NO_OFFER])) == [0, 4]


def test_a_free_proposer_that_is_seldom_heard_does_not_keep_the_model_silent() -> None:
    """Lookup is always right where it speaks, which says nothing of the steps where it is silent."""
    controller, request = policy(free_is_right=True), decoding("r")
    for step in range(30, 60):
        controller.acceptance.learn([Outcome("r", "lookup", 4, 4)], step)
    assert asked(controller, NO_OFFER) == 4 and controller.budget(request) == 4


def test_a_draft_that_knows_when_it_is_right_is_asked_where_its_average_would_not_pay() -> None:
    """One offer in four is surely right, the others surely wrong and not verified; against one that cannot tell."""
    for tells in (True, False):
        controller = policy(free_is_right=False, draft_seconds=0.0007)
        controller.cost.verify = ForwardCost(512, {1: 0.01, 2: 0.014, 512: 2.0})
        for step in range(200):
            right = step % 4 == 0
            sure = ((0.99 if right else 0.01) if tells else 0.3,) * 4
            controller.acceptance.note([Ask(f"c{step}", "model", 4, sure)])
            controller.acceptance.learn([Outcome(f"c{step}", "model", 4, 4 if right else 0, sure)], step)
        controller.step = 200
        request = decoding("r")
        row = Row(request, 9, 1, 4)
        controller._kind = "plan"
        assert (controller.model_depths([row], [NO_OFFER])[0] > 0) == tells


def test_a_model_that_was_passed_over_is_tried_again() -> None:
    """Seldom, and by what that costs."""
    controller = policy(free_is_right=True, draft_seconds=0.002)
    del controller.probes.model_is_due  # type: ignore[method-assign]
    row, tried = Row(decoding("r"), 9, 1, 4), []
    controller._kind = "plan"
    for step in range(1000, 4000):
        controller.step = step
        tried.append(controller.model_depths([row], [LOOKUP])[0] > 0)
    assert 5 < sum(tried) < 100


def test_whom_to_ask_is_worked_out_again_where_a_free_offer_comes_or_the_plan_is_new() -> None:
    """While a plan is kept and nobody has a free offer, the last answer serves; it is the one a new search gives."""
    controller, request, counted = policy(free_is_right=True), decoding("r"), []
    search = controller._whom_to_ask
    controller._whom_to_ask = lambda *given: (counted.append(1), search(*given))[1]  # type: ignore[method-assign]
    for free in (NO_OFFER, NO_OFFER, NO_OFFER, LOOKUP, NO_OFFER):
        controller.prepare([request], [])
        row = Row(request, 9, 1, controller.budget(request))
        assert controller.model_depths([row], [free]) == [0 if free is LOOKUP else 4]
    assert len(counted) == 2
    controller.prepare([request, decoding("s")], [])
    rows = [Row(request, 9, 1, 4), Row(decoding("s"), 9, 1, 4)]
    assert controller.model_depths(rows, [NO_OFFER, NO_OFFER]) == [4, 4] and len(counted) == 3


def test_the_better_offer_is_taken() -> None:
    model = Offer((1, 2, 3, 4), "model")
    for right in (False, True):
        controller = policy(free_is_right=right)
        row = Row(decoding("r"), 9, 1, 4)
        assert controller.choose(row, [LOOKUP, model]) == (0 if right else 1)


def test_an_adaptive_hybrid_says_what_the_target_says(toy: str) -> None:
    """Lookup, suffix and a self-draft under one controller, against plain decoding, in float64."""
    speculative = specdec.SpeculativeConfig(method="hybrid", draft=toy, num_speculative_tokens=4)
    made = LLM(toy, "hybrid", speculative=speculative, dtype="float64", num_kv_blocks=64)
    controller, proposer = made.engine.controller, made.engine.proposer
    assert isinstance(controller, AdaptiveLength) and isinstance(proposer, HybridProposer)
    assert proposer.policy is controller and controller.sources.costly == "draft_model"
    for temperature in (0.0, 1.0):
        params = {"max_tokens": 40, "seed": 3, "temperature": temperature}
        assert ids(made, PROMPTS, **params) == ids(llm(toy), PROMPTS, **params)
    assert_clean(made)
    assert controller.totals.num_steps > 20


def test_a_model_is_asked_for_less_than_a_lookup_may_offer() -> None:
    """Where rows have room for sixteen drafts; a probe of the model too."""
    controller = policy(free_is_right=False)
    controller.sources = replace(controller.sources, deepest=2)
    rows = [Row(decoding(f"r{i}"), 9, 1, 16) for i in range(4)]
    for kind in ("plan", "probe"):
        controller._kind = kind
        assert set(controller.model_depths(rows, [NO_OFFER] * 4)) == {2}


def test_lookups_that_offer_more_than_the_model_is_asked_for_are_weighed_beside_it() -> None:
    """One row and many, all offered sixteen tokens or one of them; the model is asked where it pays."""
    for size in (1, 3, 14):
        for free_is_right in (True, False):
            controller = policy(free_is_right)
            controller.sources = replace(controller.sources, deepest=5)
            rows = [Row(decoding(f"r{i}"), 9, 1, 16) for i in range(size)]
            controller._kind = "plan"
            long = Offer(tuple(range(16)), "lookup")
            for offers in ([long] * size, [long, *[NO_OFFER] * (size - 1)]):
                depths = controller.model_depths(rows, offers)
                assert max(depths) <= 5 and (depths[0] == 0 or not free_is_right)
