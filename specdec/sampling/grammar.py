"""Grammars: from what a request asks for to a matcher over the model's tokens.

It knows one tokenizer and the grammars compiled for it, by their text. Compiling may take a while: it belongs
at the door, on the caller's thread, never in a step. (llguidance computes masks while it walks, so nothing
is prepared for the whole vocabulary.)
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from specdec.errors import InvalidRequestError
from specdec.sampling.matcher import Matcher
from specdec.structured_outputs import StructuredOutputsParams

logger = logging.getLogger("specdec")

MAX_CACHED = 64
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON, unless a request says otherwise."""

_Key = tuple[str, str, bool, bool, str | None]


class GrammarCompiler:
    """The grammars of one model.

    tokenizer       of transformers; None: the model has none, and every grammar is refused
    vocab_size      ids the model has scores for
    eos_token_ids   any of them ends an output where the grammar lets it end
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._inner = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._tokens: Any = None
        self._cache: OrderedDict[_Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Any:
        """The grammar's LLMatcher at its start, to be copied; raises InvalidRequestError where it does not compile."""
        key = (
            params.kind, params.text, params.disable_any_whitespace, params.disable_additional_properties,
            params.whitespace_pattern,
        )  # fmt: skip
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        made = self._make(params)
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return made

    def matcher(self, params: StructuredOutputsParams, *, ignore_eos: bool = False) -> Matcher:
        """A matcher of one request's own.

        ignore_eos   EOS comes only where nothing else may
        """
        inner = self.compile(params).deep_copy()
        num_bytes = (self._tokenizer().vocab_size + 31) // 32 * 4
        return Matcher(inner, num_bytes, self._eos if ignore_eos else ())

    def prepare(self) -> None:
        """Read the vocabulary now: a second in which no other thread runs, so a server does it before it serves."""
        try:
            self._tokenizer()
        except InvalidRequestError as error:
            logger.info("requests for structured outputs will be refused: %s", error)

    def _make(self, params: StructuredOutputsParams) -> Any:
        from llguidance import LLMatcher

        tokens = self._tokenizer()
        try:
            made = LLMatcher(tokens, _source(params), log_level=0)
        except ValueError as error:
            raise _refusal(params, str(error)) from None
        if made.is_error():
            raise _refusal(params, made.get_error())
        first = made.deep_copy()
        ends = self._eos or [tokens.eos_token]
        if made.is_stopped() or not _says_something(first.compute_bitmask(), ends):
            raise _refusal(params, first.get_error() if first.is_error() else "it leaves nothing to say")
        return made

    def _tokenizer(self) -> Any:
        """The vocabulary as llguidance reads it; about a second for a large one, once."""
        with self._lock:
            if self._tokens is None:
                if self._inner is None:
                    raise InvalidRequestError(
                        "structured_outputs is given but the target has no tokenizer", param="structured_outputs"
                    )
                try:
                    self._tokens = _read_vocabulary(self._inner, self._vocab_size, self._eos)
                except ValueError as error:
                    raise InvalidRequestError(
                        f"structured_outputs is given but the target's tokenizer cannot be used for it: {error}",
                        param="structured_outputs",
                    ) from None
            return self._tokens


class _Words:
    """A vocabulary whose text never becomes a special token: a grammar that spells one means its characters."""

    def __init__(self, tokenizer: Any, tokens: list[bytes], special_token_ids: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos
        self.bos_token_id = None
        self._backend = copy.copy(tokenizer.backend_tokenizer)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    def __call__(self, text: bytes | str) -> list[int]:
        said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids: list[int] = self._backend.encode(said, add_special_tokens=False).ids
        return ids


def _read_vocabulary(tokenizer: Any, vocab_size: int, eos: list[int]) -> Any:
    """llguidance's view of the tokens' bytes, with an encoder of ours that knows no special tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    read = from_tokenizer(tokenizer, vocab_size, eos or None)
    special = sorted(i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i < vocab_size)
    tokens = [read.decode_bytes([i]) for i in range(read.vocab_size)]
    for i in special:
        tokens[i] = tokenizer.convert_ids_to_tokens(i).encode()
    words = _Words(tokenizer, tokens, special, eos[0] if eos else int(read.eos_token))
    return LLTokenizer(TokenizerWrapper(words), n_vocab=read.vocab_size, eos_token=eos or None)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's words."""
    from llguidance import LLMatcher, grammar_from

    if params.kind not in ("json", "json_object"):
        return str(grammar_from(params.kind, params.text))  # type: ignore[arg-type]
    spaces = params.whitespace_pattern or WHITESPACE
    flexible = not params.disable_any_whitespace
    options: Any = (
        {"whitespace_flexible": True, "whitespace_pattern": spaces} if flexible else {"whitespace_flexible": False}
    )
    schema = json.loads(params.text)
    if params.disable_additional_properties:
        _close(schema)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "items", "prefixItems", "additionalItems", "additionalProperties", "contains", "propertyNames", "anyOf", "allOf",
    "oneOf", "not", "if", "then", "else",
)  # fmt: skip
"""Where a schema holds schemas; what stands in const, enum, default and examples is data."""


def _close(schema: Any) -> None:
    """Let no object of a schema hold more than it names, where the schema does not speak of it itself."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("properties"), dict):
            part.setdefault("additionalProperties", False)
        for name in _NAMED_SCHEMAS:
            parts += part[name].values() if isinstance(part.get(name), dict) else ()
        for name in _SCHEMAS:
            inner = part.get(name)
            parts += inner if isinstance(inner, list) else [inner]


def _says_something(bits: bytes, ends: Iterable[int]) -> bool:
    """True where a mask allows a token that does not end the output."""
    others = bytearray(bits)
    for token_id in ends:
        others[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return any(others)


def _refusal(params: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    said = " ".join(reason.split()) or "no reason given"  # a pointer under a pattern keeps its place in no message
    return InvalidRequestError(
        f"structured_outputs.{params.kind} does not compile: {said[:300]}", param="structured_outputs"
    )
