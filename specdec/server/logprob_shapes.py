"""Log-probabilities in OpenAI's two shapes.

It knows the names of fields; the numbers come from the engine as they are, one a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.logprobs import TokenLogprob
from specdec.server.generation import Piece
from specdec.server.token_text import TokenText

Json = dict[str, Any]

NOT_FINITE = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def _value(logprob: float | None) -> float:
    return NOT_FINITE if logprob is None else logprob


def completion_logprobs(pieces: Sequence[Piece], words: TokenText) -> Json:
    """Parallel lists; what begins an echoed prompt follows nothing, so its entries are null."""
    return {
        "tokens": [words.text_of(piece.token_id) for piece in pieces],
        "token_logprobs": [None if p.logprob is None else _value(p.logprob.logprob) for p in pieces],
        "top_logprobs": [None if p.logprob is None else _top(p.logprob, words) for p in pieces],
        "text_offset": [piece.offset for piece in pieces],
    }


def _top(logprob: TokenLogprob, words: TokenText) -> dict[str, float]:
    """The likeliest tokens by their text, best first; the token itself is always among them."""
    named: dict[str, float] = {}
    for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
        named.setdefault(words.text_of(token_id), _value(value))
    return named


def chat_logprobs(pieces: Sequence[Piece], words: TokenText) -> Json:
    """One entry a token, with its bytes."""
    entries = []
    for piece in pieces:
        if piece.logprob is not None:
            top = [_entry(token_id, value, words) for token_id, value in piece.logprob.top]
            entries.append(_entry(piece.token_id, piece.logprob.logprob, words) | {"top_logprobs": top})
    return {"content": entries, "refusal": None}


def _entry(token_id: int, logprob: float | None, words: TokenText) -> Json:
    return {"token": words.text_of(token_id), "logprob": _value(logprob), "bytes": list(words.bytes_of(token_id))}
