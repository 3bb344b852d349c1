"""Options of an engine: what may be said in more than one way, and what is refused by name before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec.llm import engine_config
from specdec.proposers import most_drafts


def test_a_hybrid_takes_the_model_that_the_config_names() -> None:
    for draft, config in (
        ("hybrid", {"draft": "m"}),
        ("m", {"method": "hybrid"}),
        ("auto", {"method": "hybrid", "draft": "m"}),
    ):
        speculative = engine_config("t", draft, config).speculative
        assert (speculative.method, speculative.draft) == ("hybrid", "m")


def test_none_turns_speculation_off_in_both_spellings() -> None:
    assert engine_config("t", None).speculative.method == engine_config("t", "none").speculative.method == "none"


def test_paths_and_dicts_are_taken() -> None:
    config = engine_config(Path("a") / "b", Path("c"), {"num_speculative_tokens": 3, "adaptive": False})
    assert config.target.model == "a/b" and config.speculative.draft == "c"
    assert config.speculative.num_speculative_tokens == 3


@pytest.mark.parametrize(
    "param, options",
    [
        ("speculative", {"speculative": 5}),
        ("speculative", {"speculative": "ngram"}),
        ("flux", {"speculative": {"flux": 1}}),
        ("draft", {"draft": None, "speculative": {"method": "ngram"}}),
        ("draft", {"draft": "none", "speculative": {"draft": "m"}}),
        ("draft", {"draft": "ngram", "speculative": {"draft": "m"}}),
        ("draft", {"draft": "a", "speculative": {"draft": "b"}}),
        ("draft", {"speculative": {"draft": 5}}),
        ("draft", {"speculative": {"draft": ""}}),
        ("trace", {"speculative": {"trace": "file", "adaptive": False}}),
        ("seed", {"seed": [1]}),
        ("seed", {"seed": 2**64}),
        ("model", {"target": 7}),
        ("model", {"target": ""}),
        ("device", {"device": 0}),
        ("dtype", {"dtype": None}),
        ("block_size", {"block_size": 16.0}),
        ("max_num_seqs", {"max_num_seqs": True}),
        ("num_kv_blocks", {"num_kv_blocks": 0}),
        ("kv_cache_memory", {"kv_cache_memory": -1}),
        ("gpu_memory_utilization", {"gpu_memory_utilization": float("nan")}),
    ],
)
def test_a_bad_option_is_refused_by_name(param: str, options: dict[str, Any]) -> None:
    with pytest.raises(specdec.InvalidRequestError) as refused:
        engine_config(**options)
    assert refused.value.param == param and str(refused.value)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"method": "ngram"}, 16),
        ({"method": "suffix"}, 16),
        ({"method": "hybrid", "draft": "m"}, 16),
        ({"method": "eagle", "draft": "m"}, 5),
        ({"method": "draft_model", "draft": "m"}, 4),
        ({"method": "ngram", "adaptive": False}, 5),
        ({"method": "ngram", "num_speculative_tokens": 3}, 3),
        ({"method": "hybrid", "draft": "m", "num_speculative_tokens": 20}, 20),
    ],
)
def test_most_drafts_by_method(config: dict[str, Any], most: int) -> None:
    assert most_drafts(specdec.SpeculativeConfig(**config)) == most
