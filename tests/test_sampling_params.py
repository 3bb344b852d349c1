"""Bad values are refused at the door, naming the parameter, the value and the limit."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from specdec import SamplingParams, SpeculativeConfig
from specdec.errors import InvalidRequestError

BAD: list[tuple[str, Any]] = [
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 2**63),
    ("top_k", 1.5),
    ("n", 0),
    ("n", 10**9),
    ("seed", 2**63),
    ("seed", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", "5"),
    ("stop", ""),
    ("stop", ["", "x"]),
    ("stop", [1]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [2**63]),
    ("ignore_eos", 1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", float("nan")),
    ("presence_penalty", 2.1),
    ("presence_penalty", float("inf")),
    ("presence_penalty", False),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e9),
    ("repetition_penalty", float("nan")),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {True: 1}),
    ("logit_bias", {2**63: 1}),
    ("logit_bias", [1]),
    ("bad_words", "x"),
    ("bad_words", [""]),
    ("bad_words", [" "]),
    ("bad_words", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [1.5]),
    ("allowed_token_ids", 3),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("min_tokens", 1.0),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 2**63),
    ("logprobs_mode", "raw"),
    ("skip_special_tokens", None),
    ("speculative", {"enabled": 1}),
    ("speculative", {"num_speculative_tokens": -1}),
    ("speculative", {"unknown": 1}),
    ("speculative", 5),
    ("stop", "\ud800"),  # half of a surrogate pair
    ("bad_words", ["a", "\udfff"]),
    ("temperature", "x" * 10**6),
    ("n", 10**5000),  # more digits than Python prints
    ("stop_token_ids", [10**5000]),
    ("stop", functools.reduce(lambda inner, _: [inner], range(10**5), ["deep"])),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[name for name, _ in BAD])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, InvalidRequestError) and (caught.value.param or "").startswith(name)
    assert len(str(caught.value)) < 400


BAD_SHAPES: list[Any] = [
    {}, {"json": {}, "regex": "a"}, {"json": "{"}, {"json": 5}, {"json": {"a": float("nan")}}, {"regex": ""},
    {"regex": 5}, {"choice": []}, {"choice": ["a", ""]}, {"choice": "ab"}, {"choice": ["a"] * 5000}, {"grammar": 1},
    {"json_object": False}, {"yaml": "a"}, {"regex": "a", "disable_any_whitespace": 1}, 5, "regex", ["a"],
    {"regex": "a" * (2**20 + 1)}, {"json": {}, "whitespace_pattern": ""},
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_SHAPES, ids=lambda value: repr(value)[:40])
def test_structured_outputs_that_mean_nothing_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 400


def test_neutral_values_pass() -> None:
    SamplingParams(min_p=0, presence_penalty=0, repetition_penalty=1.0, logit_bias={}, bad_words=[], stop=[], top_k=0)
    assert SamplingParams(logit_bias={"7": 1, 8: -100}).logit_bias == {7: 1.0, 8: -100.0}  # JSON has text keys


def test_a_refusal_names_the_value_and_the_range() -> None:
    with pytest.raises(InvalidRequestError, match="presence_penalty is 3; it must be a finite number from -2 to 2"):
        SamplingParams(presence_penalty=3)
    with pytest.raises(InvalidRequestError, match="min_tokens is 9; it must be at most max_tokens, which is 5"):
        SamplingParams(min_tokens=9, max_tokens=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 65),
        ("method", "magic"),
        ("adaptive", "yes"),
        ("trace", ""),
        ("profile_seconds", -1),
    ],
)
def test_a_bad_speculative_config_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SpeculativeConfig(**{name: value})
    with pytest.raises(ValueError, match="unknown keys foo"):
        SpeculativeConfig.from_dict({"foo": 1})
