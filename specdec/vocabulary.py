"""Vocabulary: whether the ids and words a request names exist in the model that will serve it.

It knows one vocabulary's size and its tokenizer; ranges that need neither are checked in `sampling_params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from specdec.errors import InvalidRequestError, shown
from specdec.rules import Rules
from specdec.sampling_params import SamplingParams
from specdec.tokenizer import Tokenizer


def resolve(params: SamplingParams, rules: Rules, vocab_size: int, tokenizer: Any) -> Rules:
    """A request's rules with its bad words turned into ids; every id it names is checked.

    tokenizer   the model's own, of transformers; None: the model has none
    """
    named = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or {},
    }
    for name, ids in named.items():
        _check_known(name, ids, vocab_size)
    if params.bad_words:
        rules = replace(rules, bad_words=bad_word_ids(params.bad_words, tokenizer, vocab_size))
    if rules.bans or rules.allowed is not None:
        _check_something_is_left(params, rules, vocab_size)
    return rules


def _check_known(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"{name} holds {token_id}; token ids of this model are from 0 to {vocab_size - 1}", param=name
            )


def bad_word_ids(words: Sequence[str], tokenizer: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Every word as ids, as it stands at the start of a text and behind a space.

    Like vLLM's, but the form behind a space is kept wherever the other form is not its end already.
    """
    if tokenizer is None:
        raise InvalidRequestError("bad_words is given but the target has no tokenizer", param="bad_words")
    encode = Tokenizer(tokenizer).encode
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(encode(" " + word.lstrip(), add_special_tokens=False))
        if not bare or not spaced:
            raise InvalidRequestError(
                f"bad_words holds {shown(word)}; it has no tokens in this model", param="bad_words"
            )
        _check_known("bad_words", (*bare, *spaced), vocab_size)
        found[bare] = None
        if spaced[-len(bare) :] != bare:
            found[spaced] = None
    return tuple(found)


def _check_something_is_left(params: SamplingParams, rules: Rules, vocab_size: int) -> None:
    banned = set(rules.banned(0, ()).tolist())
    left = len(banned) < vocab_size if rules.allowed is None else not banned.issuperset(rules.allowed.tolist())
    if not left:
        name = "allowed_token_ids" if params.allowed_token_ids is not None else "bad_words"
        raise InvalidRequestError(
            f"{name} leaves no token for the first place of the output; bad_words and min_tokens "
            f"(which is {rules.min_tokens} and rules out what would end the output) ban the others",
            param=name,
        )
