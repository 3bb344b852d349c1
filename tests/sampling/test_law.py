"""Whole outputs follow the law that enumeration gives, for every parameter, with any proposer and draft length.

12,288 outputs of 3 tokens over a vocabulary of 8 a case. A right sampler fails a case with probability one in
a million (see `bound`), and the seeds are fixed besides.
"""

from __future__ import annotations

from typing import Any

import pytest

from specdec.proposers.base import Proposer
from specdec.sampling import sampler
from specdec.sampling.choice import Choice
from specdec.sampling_params import SamplingParams
from tests.sampling.by_hand import bound, chi_square, outputs
from tests.sampling.table_model import Digits, TableModel, run, table_engine

NUM_DRAWS = 12_288
PROMPT = [3, 1, 4]
TARGET = TableModel.random(0, eos=frozenset({6}), tokenizer=Digits())
PROPOSERS = {"good": TARGET.near(1, 0.4), "bad": TableModel.random(2), "self": TARGET}

CASES: list[tuple[dict[str, Any], int, str]] = [
    ({"min_p": 0.2}, 3, "good"),
    ({"repetition_penalty": 1.7}, 3, "good"),
    ({"allowed_token_ids": [0, 2, 3, 7], "logit_bias": {0: 2.0, 5: -100.0}}, 1, "good"),
    ({"bad_words": [[2], [3, 3], [1, 0, 1]], "min_tokens": 2}, 3, "good"),
    ({"temperature": 0.6, "top_k": 5, "top_p": 0.85, "min_p": 0.02}, 3, "good"),
    (
        {"presence_penalty": 0.8, "frequency_penalty": -0.5, "bad_words": [[7, 7]], "top_k": 6, "temperature": 1.5},
        5,
        "bad",
    ),
]
MORE: list[tuple[dict[str, Any], int, str]] = [
    ({"repetition_penalty": 0.6}, 1, "bad"),
    ({"bad_words": [[2], [3, 3], [1, 0, 1]]}, 5, "good"),
    ({"min_tokens": 2}, 5, "self"),
    ({"presence_penalty": 2.0}, 3, "bad"),
    ({"presence_penalty": -2.0}, 5, "good"),
    ({"frequency_penalty": 2.0}, 3, "bad"),
    ({"frequency_penalty": -2.0}, 5, "self"),
    ({"logit_bias": {0: 2.0, 5: -100.0}}, 3, "bad"),
    ({"allowed_token_ids": [0, 2, 3, 7]}, 5, "good"),
    ({"temperature": 1.4, "repetition_penalty": 1.3, "top_p": 0.9, "logit_bias": {4: 1.5}, "min_tokens": 3}, 3, "bad"),
    ({"frequency_penalty": 1.0, "allowed_token_ids": [1, 2, 5, 6], "min_p": 0.1}, 0, "good"),
]


def _name(value: object) -> str:
    return "+".join(value) if isinstance(value, dict) else str(value)


def draw(
    params: dict[str, Any], k: int, proposer: Proposer | TableModel, count: int = NUM_DRAWS
) -> list[tuple[int, ...]]:
    own = {**params, "bad_words": ["".join(map(str, w)) for w in params.get("bad_words", ())]}
    engine = table_engine(TARGET, k, proposer)
    requests = run(engine, [PROMPT] * count, [SamplingParams(max_tokens=3, **own)] * count)
    return [tuple(r.output_token_ids) for r in requests]


def _check(params: dict[str, Any], k: int, proposer: str) -> None:
    expected = outputs(TARGET.scores, PROMPT, params, 3, stop_ids=[6])
    statistic, freedom = chi_square(draw(params, k, PROPOSERS[proposer]), expected)
    assert statistic < bound(freedom)


@pytest.mark.parametrize(("params", "k", "proposer"), CASES, ids=_name)
def test_outputs_follow_the_law(params: dict[str, Any], k: int, proposer: str) -> None:
    _check(params, k, proposer)


@pytest.mark.slow
@pytest.mark.parametrize(("params", "k", "proposer"), MORE, ids=_name)
def test_outputs_follow_the_law_in_more_cases(params: dict[str, Any], k: int, proposer: str) -> None:
    _check(params, k, proposer)


def test_another_law_is_caught() -> None:
    expected = outputs(TARGET.scores, PROMPT, {"presence_penalty": 0.5}, 3, stop_ids=[6])
    statistic, freedom = chi_square(draw({"frequency_penalty": 0.9}, 3, PROPOSERS["good"], 4096), expected)
    assert statistic > bound(freedom)


def test_a_sampler_whose_noise_depends_on_the_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where the draft was missed, fresh noise is tried once more."""
    honest = sampler._sample

    def lying(logits: Any, choices: list[Choice]) -> Any:
        chosen, is_finite = honest(logits, choices)
        for i, choice in enumerate(choices):
            following = choices[i + 1].drafts_before[-1:] if i + 1 < len(choices) else ()
            if following and int(chosen[i]) != following[0]:  # a second try
                again = Choice(choice.request, choice.position + 1000, choice.drafts_before)
                chosen[i] = honest(logits[i : i + 1], [again])[0][0]
        return chosen, is_finite

    monkeypatch.setattr(sampler, "uses_native", lambda logits: False)  # where `_sample` is passed by
    monkeypatch.setattr(sampler, "_sample", lying)
    expected = outputs(TARGET.scores, PROMPT, {}, 3, stop_ids=[6])
    statistic, freedom = chi_square(draw({}, 3, PROPOSERS["bad"], 8192), expected)
    assert statistic > 2 * bound(freedom)
