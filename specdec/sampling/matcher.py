"""Matcher: one request's place in its grammar, how far it walked over drafts, and what may come next.

It knows token ids and bits; it knows no scores and no other request. Drafts are walked over ahead of the
committed output and taken back when something else was emitted, so a rejected draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint8]
"""One bit a token id, the lowest bit of a byte first; padded to whole words of 32."""


class Matcher:
    """Walks a compiled grammar.

    inner         an LLMatcher of llguidance at the start of the grammar, this matcher's own
    num_bytes     length of a mask
    held_back     ids that may come only where nothing else may (EOS of a request that ignores it)
    error         why the grammar can no longer be followed (a limit was hit); then no token may come
    """

    def __init__(self, inner: Any, num_bytes: int, held_back: Sequence[int] = ()) -> None:
        self.error = ""
        self._inner = inner
        self._bits_of_all: Bits = np.full(num_bytes, 0xFF, np.uint8)
        self._held_back = tuple(held_back)
        self._ahead: list[int] = []  # tokens the inner matcher has taken beyond the committed output
        self._bits: list[Bits | None] = [None]  # what may come behind the first i of them
        self._forced: tuple[int, ...] | None = None

    def push(self, token_id: int) -> bool:
        """Commit one emitted token; True where the output is complete, so that nothing may follow."""
        self._forced = None
        if self._ahead and self._ahead[0] == token_id:
            del self._ahead[0], self._bits[0]
            return not self._ahead and self._is_complete()
        self._rewind(0)
        self._bits = [None]
        if not self._inner.try_consume_tokens([token_id]):
            self._note_error(f"the token {token_id} does not fit the grammar")
        return self._is_complete()

    def mask(self, drafts: Sequence[int] = ()) -> Bits:
        """What may come behind the committed output and these drafts.

        Everything, where the drafts leave or complete the grammar: nothing behind them is ever emitted.
        """
        depth = len(drafts)
        if self.error:
            return np.zeros_like(self._bits_of_all)
        known = self._bits[depth] if self._ahead[:depth] == list(drafts) else None
        if known is not None:
            return known
        if not self._walk(drafts) or self._is_complete():
            return self._bits_of_all
        bits = self._bits[depth] = self._compute()
        return bits

    def allows(self, token_id: int, drafts: Sequence[int]) -> bool:
        """True where this token may come behind these drafts, which themselves fit."""
        bits = self.mask(drafts)
        return token_id < 8 * len(bits) and bool(bits[token_id >> 3] >> (token_id & 7) & 1)

    def has_choice(self, drafts: Sequence[int]) -> bool:
        """True where more than one token may come behind these drafts, which themselves fit."""
        bits = self.mask(drafts)
        return bool(np.count_nonzero(bits) > 1) or int(bits.max()).bit_count() > 1

    def completes(self, drafts: Sequence[int]) -> bool:
        """True where these drafts, which fit, complete the output."""
        if self._ahead[: len(drafts)] == list(drafts) and len(self._ahead) > len(drafts):
            return False
        return self._walk(drafts) and self._is_complete()

    def forced(self, drafts: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that must come behind these drafts, one after the other; none where there is a choice."""
        if not drafts and self._forced is not None:
            return self._forced
        tokens = tuple(self._inner.compute_ff_tokens()) if self._walk(drafts) and not self.error else ()
        if not drafts:
            self._forced = tokens
        return tokens

    def _walk(self, drafts: Sequence[int]) -> bool:
        """Go to the place behind these drafts; False where they do not fit."""
        common = 0
        while common < min(len(drafts), len(self._ahead)) and self._ahead[common] == drafts[common]:
            common += 1
        self._rewind(common)
        rest = list(drafts[common:])
        num_taken = self._inner.try_consume_tokens(rest) if rest else 0
        self._ahead += rest[:num_taken]
        self._bits += [None] * num_taken
        return num_taken == len(rest)

    def _rewind(self, depth: int) -> None:
        if len(self._ahead) > depth:
            self._inner.rollback(len(self._ahead) - depth)
            del self._ahead[depth:], self._bits[depth + 1 :]

    def _is_complete(self) -> bool:
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    def _compute(self) -> Bits:
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)[: len(self._bits_of_all)].copy()
        if self._inner.is_error():
            self._note_error(str(self._inner.get_error()).split("\n", 1)[0])
            bits[:] = 0
            return bits
        if self._held_back:
            others = bits.copy()
            for token_id in self._held_back:
                others[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
            bits = others if others.any() else bits
        return bits

    def _note_error(self, message: str) -> None:
        self.error = self.error or message
