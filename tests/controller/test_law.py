"""Claims about rejection sampling and admission: what is decided after the draw bends the law, what before does not.

The law of one output token is computed exactly, by enumeration. The target's law p and the draft's q
are (1/2, 1/2): every drawn draft is accepted, so a rule that looks and drops what it does not like
draws again, and likes it more often than p does.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from evals.sim_run import SOURCE
from specdec.batch import Drafts, Offer, Plan, Row
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.controller import FixedLength
from specdec.request import Request
from specdec.sampling_params import SamplingParams

HALF = Fraction(1, 2)
P = Q = (HALF, HALF)


def law(admits: Callable[[int], bool]) -> tuple[Fraction, Fraction]:
    """Of one token under rejection sampling (Leviathan et al. 2023), where `admits` decides on the drawn draft."""
    out = [Fraction(0), Fraction(0)]
    for drawn in (0, 1):
        if not admits(drawn):  # a plain token instead
            for token in (0, 1):
                out[token] += Q[drawn] * P[token]
            continue
        accepted = min(Fraction(1), P[drawn] / Q[drawn])
        out[drawn] += Q[drawn] * accepted
        residual = [max(p - q, Fraction(0)) for p, q in zip(P, Q, strict=True)]
        for token in (0, 1):
            if accepted < 1:
                out[token] += Q[drawn] * (1 - accepted) * residual[token] / sum(residual)
    return out[0], out[1]


def admission(*, looks: bool) -> Callable[[int], bool]:
    """The controller's rule where the proposer says that it is sure of token 1 and not of token 0.

    Verifying is dear enough that a doubtful draft is not worth it: looking is rewarded.
    """

    def admits(drawn: int) -> bool:
        verify = ForwardCost(8, {1: 0.010, 2: 0.0142, 8: 0.05})
        sources = Sources(free=(SOURCE,), looks=looks)
        controller = AdaptiveLength(FixedLength(1, None), sources, verify)
        request = Request("r", [1] * 10, SamplingParams(max_tokens=50), max_output_tokens=50)
        request.num_computed_tokens = 9
        controller.probes.plain_is_due = lambda *_: False  # type: ignore[method-assign]
        controller.prepare([request], [])
        plan = Plan((Row(request, 9, 1, controller.budget(request)),))
        if not plan.rows[0].max_drafts:
            return False
        offer = Offer((drawn,), SOURCE, (0.9 if drawn else 0.05,))
        return bool(controller.admit(plan, Drafts((offer,))).rows[0].draft_token_ids)

    return admits


def test_without_looking_the_law_holds() -> None:
    assert law(admission(looks=False)) == P


def test_a_rule_that_looks_is_caught() -> None:
    """The controller itself, when it may look, is such a rule: right for coupled acceptance, wrong here."""
    assert law(admission(looks=True)) == (Fraction(1, 4), Fraction(3, 4))
    assert law(lambda drawn: drawn == 1) == (Fraction(1, 4), Fraction(3, 4))


@pytest.mark.parametrize("confidences", [(), (0.01, 0.01), (0.99, 0.99)])
def test_without_looking_neither_tokens_nor_confidences_change_what_is_admitted(confidences: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        controller = AdaptiveLength(
            FixedLength(2, None), Sources(free=(SOURCE,), looks=False), ForwardCost(8, {1: 0.01, 8: 0.011})
        )
        controller.probes.plain_is_due = lambda *_: False  # type: ignore[method-assign]
        request = Request("r", [1] * 10, SamplingParams(max_tokens=50), max_output_tokens=50)
        request.num_computed_tokens = 9
        controller.prepare([request], [])
        plan = Plan((Row(request, 9, 1, controller.budget(request)),))
        tokens = tuple(int(t) for t in rng.integers(0, 100, 2))
        row = controller.admit(plan, Drafts((Offer(tokens, SOURCE, confidences),))).rows[0]
        assert row.draft_token_ids == tokens
