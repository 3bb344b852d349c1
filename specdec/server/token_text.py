"""Single tokens as bytes and text, for log-probabilities: also of tokens that are half a character.

It knows how vocabularies spell bytes: GPT-2's printable stand-ins, or "<0xE2>" and a low line for a space.
"""

from __future__ import annotations

import re
from functools import lru_cache

from specdec.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _stand_ins() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in kept)
    return {chr(b): b for b in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """Bytes and text of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer.inner
        self._special = set(self._inner.all_special_ids)
        backend = getattr(self._inner, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        self._stand_ins = _stand_ins()
        self.bytes_of = lru_cache(65536)(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._inner.convert_ids_to_tokens(token_id)
        if token is None:  # the model's vocabulary is padded beyond the tokenizer's
            return b""
        if token_id in self._special:
            return str(token).encode()
        if self._is_byte_level and all(char in self._stand_ins for char in token):
            return bytes(self._stand_ins[char] for char in token)
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else str(token).replace(_SPACE, " ").encode()

    def text_of(self, token_id: int) -> str:
        """The token's text; of half a character, its bytes spelt out, so that different tokens stay different."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
