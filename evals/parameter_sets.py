"""Parameter sets: random sampling parameters of every kind, drawn by hypothesis.

They know names, ranges and which ids and words of a workload make a parameter matter. They run nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ParameterSet = dict[str, Any]

SHAPES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f ]{6,30}"},
    {"choice": ["yes", "yes, of course", "no"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "ab" start | "c"'},
)


@dataclass(frozen=True, slots=True)
class Pool:
    """What the outputs are likely to hold, so that a rule about it changes them.

    token_ids   at least 8
    words       of the outputs' text, in pieces that may begin or end inside a token
    """

    token_ids: tuple[int, ...]
    words: tuple[str, ...]


def strategy(pool: Pool, max_tokens: int) -> st.SearchStrategy[ParameterSet]:
    """Sets of at most `max_tokens` tokens; some contradict the model, and its door refuses those."""
    token_id, word = st.sampled_from(pool.token_ids), st.sampled_from(pool.words)
    penalty = st.floats(-2, 2) | st.sampled_from([-2.0, 0.0, 2.0])
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([*[0.0] * 4, 1e-6, 1e-5, 1e-4, 1e-3, *(i / 20 for i in range(2, 31))]),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "max_tokens": st.integers(1, max_tokens) | st.just(max_tokens),
        },
        optional={
            "n": st.sampled_from([1, 1, 2]),
            "top_k": st.sampled_from([-1, 0, 1, 2, 20, 500, 2**40]),
            "top_p": st.floats(0.01, 1) | st.sampled_from([1e-9, 0.9, 0.999]),
            "min_p": st.floats(0, 1) | st.sampled_from([0.02, 0.1]),
            "presence_penalty": penalty,
            "frequency_penalty": penalty,
            "repetition_penalty": st.floats(0.5, 2) | st.sampled_from([1.0, 1.1]),
            "logit_bias": st.dictionaries(token_id, st.floats(-100, 20), max_size=6),
            "allowed_token_ids": st.lists(token_id, min_size=8, max_size=60, unique=True),
            "bad_words": st.lists(word.filter(str.strip), max_size=4),
            "min_tokens": st.integers(0, max_tokens),
            "stop_token_ids": st.lists(token_id, max_size=4),
            "stop": st.lists(word, max_size=4),
            "ignore_eos": st.booleans(),
            "logprobs": st.integers(0, 20),
            "prompt_logprobs": st.sampled_from([0, 3]),
            "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
            "structured_outputs": st.sampled_from([None, None, None, None, *SHAPES]),
        },
    )


MOST_ROUNDS = 100


def draw(
    source: st.SearchStrategy[ParameterSet], count: int, start: int, accepts: Callable[[ParameterSet], bool]
) -> list[ParameterSet]:
    """The first `count` sets that are accepted, fewer where hardly any is; `start` seeds hypothesis.

    It likes to vary what it drew before; a set counts only where its own seed is new, so no two are near copies.
    """
    found: dict[int, ParameterSet] = {}
    for turn in range(MOST_ROUNDS):
        for own in _examples(source, count, 1000 * start + turn):
            if len(found) < count and own["seed"] not in found and accepts(own):
                found[own["seed"]] = own
        if len(found) == count:
            break
    return list(found.values())


def _examples(source: st.SearchStrategy[ParameterSet], count: int, start: int) -> list[ParameterSet]:
    drawn: list[ParameterSet] = []

    @seed(start)
    @settings(
        max_examples=count, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(source)
    def offer(own: ParameterSet) -> None:
        drawn.append(own)

    offer()
    return drawn
