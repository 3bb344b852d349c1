"""Sampling parameters: what one request asks for, checked at the door.

It knows ranges and types, nothing of tokens or models: whether an id is in the vocabulary is checked
where the model is known. None is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.config import MAX_SPECULATIVE_TOKENS
from specdec.errors import InvalidRequestError, shown
from specdec.structured_outputs import StructuredOutputsParams
from specdec.tokenizer import has_unpaired_surrogate

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: noise is switched off and ties go to the lowest id."""

MAX_STOP_STRINGS = 64
MAX_N = 128
MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 100.0
MAX_BAD_WORDS = 1024
MAX_BIAS = 100.0
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_MAX_ID = 2**31 - 1


def _fail(param: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is {shown(value)}; it must be {rule}", param=param)


def _number(param: str, value: object, low: float, high: float) -> float:
    rule = f"a finite number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _fail(param, value, rule)
    if not low <= value <= high:  # false for NaN too; infinities lie outside every range
        raise _fail(param, value, rule)
    return float(value)


def _integer(param: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _fail(param, value, f"an integer from {low} to {high}")
    return value


def _texts(param: str, value: object, most: int) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise _fail(param, value, f"a list of at most {most} strings")
    for text in value:
        if not isinstance(text, str) or not text:
            raise _fail(param, value, "made of strings that are not empty")
        if has_unpaired_surrogate(text):
            raise _fail(param, text, "made of whole characters; this holds half of a surrogate pair")
    return tuple(value)


def _boolean(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _fail(param, value, "true or false")
    return value


def _ids(param: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _fail(param, value, "a list of token ids")
    for i in value:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _MAX_ID:
            raise InvalidRequestError(
                f"{param} holds {shown(i)}; token ids must be integers from 0 to {_MAX_ID}", param=param
            )
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParams:
    """One request's own say over speculation.

    enabled                 False: this request is decoded plainly
    num_speculative_tokens  at most this many drafts a step for this request; None: the engine's own
    """

    enabled: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        _boolean("speculative.enabled", self.enabled)
        if self.num_speculative_tokens is not None:
            _integer("speculative.num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends; OpenAI's and vLLM's names.

    n                    independent choices of one prompt
    temperature          0 (and anything below 1e-5) is greedy
    top_k                keep the k likeliest tokens; 0 or -1: all
    top_p                keep the likeliest tokens whose mass reaches top_p
    min_p                keep tokens at least min_p times as likely as the likeliest
    seed                 None: drawn freshly for every request
    max_tokens           None: as many as the model length and the cache allow; more than those is refused
    min_tokens           nothing ends the output before it has this many tokens
    stop                 strings that end the output and are cut from it
    repetition_penalty   above 1: tokens of prompt and output become less likely; 1: off
    presence_penalty     above 0: tokens of the output become less likely
    frequency_penalty    the same for every time they occur in it
    logit_bias           token id -> number added to its score
    bad_words            texts that the output may not complete
    allowed_token_ids    the only ids that may be chosen
    logprobs             report each token's log-probability and the N likeliest at its place
    prompt_logprobs      the same for the tokens of the prompt
    structured_outputs   what the output must match: a JSON schema, a regex, one of some texts, a grammar
    logprobs_mode        "raw_logprobs": of the model; "processed_logprobs": of the law the token was drawn from
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculative: SpeculativeParams | Mapping[str, Any] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw_logprobs"
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    priority: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.priority is not None:
            _integer("priority", self.priority, -(2**31), 2**31 - 1)
        self._set("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise _fail("top_p", self.top_p, "above 0 and at most 1")
        self._set("top_k", max(_integer("top_k", self.top_k, -1, 2**63 - 1), 0))
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _boolean("ignore_eos", self.ignore_eos)
        _boolean("skip_special_tokens", self.skip_special_tokens)
        self._set("stop_strings", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_ids())
        self._set("speculative", self._checked_speculative())
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        self._check_processors()
        self._check_limits()

    def _check_processors(self) -> None:
        """What changes scores; None is the neutral value of each."""
        ranges = {"min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}
        for name, (low, high) in ranges.items():
            if getattr(self, name) is not None:
                self._set(name, _number(name, getattr(self, name), low, high))
        if self.repetition_penalty is not None:
            value = _number("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
            if value == 0.0:
                raise _fail("repetition_penalty", value, f"above 0 and at most {MAX_REPETITION_PENALTY:g}")
            self._set("repetition_penalty", value)
        self._set("logit_bias", self._checked_bias())
        self._set("bad_words", self._checked_bad_words())
        if self.allowed_token_ids is not None:
            token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not token_ids:
                raise _fail("allowed_token_ids", self.allowed_token_ids, "a list of at least one token id")
            self._set("allowed_token_ids", token_ids)

    def _check_limits(self) -> None:
        if self.min_tokens is not None:
            _integer("min_tokens", self.min_tokens, 0, _MAX_ID)
            if self.max_tokens is not None and self.min_tokens > self.max_tokens:
                raise _fail("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise _fail("logprobs_mode", self.logprobs_mode, f"one of {', '.join(LOGPROBS_MODES)}")

    def _checked_bias(self) -> dict[int, float]:
        """Keys may be strings of digits, as they must be in JSON."""
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise _fail("logit_bias", bias, f"an object from token id to a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        checked = {}
        for key, value in bias.items():
            token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= _MAX_ID:
                raise InvalidRequestError(
                    f"logit_bias holds the key {shown(key)}; keys must be token ids, integers from 0 to {_MAX_ID}",
                    param="logit_bias",
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MAX_BIAS <= value <= MAX_BIAS:
                raise InvalidRequestError(
                    f"logit_bias holds {shown(value)} for token id {token_id}; it must be a finite number from "
                    f"{-MAX_BIAS:g} to {MAX_BIAS:g}",
                    param="logit_bias",
                )
            checked[token_id] = float(value)
        return checked

    def _checked_bad_words(self) -> tuple[str, ...]:
        words = _texts("bad_words", () if self.bad_words is None else self.bad_words, MAX_BAD_WORDS)
        if any(not word.strip() for word in words):
            raise _fail("bad_words", words, "made of strings that are not empty")
        return words

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # normalising inside __post_init__ only

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return _texts("stop", () if stop is None else stop, MAX_STOP_STRINGS)

    def _checked_stop_ids(self) -> tuple[int, ...]:
        return () if self.stop_token_ids is None else _ids("stop_token_ids", self.stop_token_ids)

    def _checked_speculative(self) -> SpeculativeParams:
        value = self.speculative
        if value is None:
            return SpeculativeParams()
        if isinstance(value, SpeculativeParams):
            return value
        known = {f.name for f in fields(SpeculativeParams)}
        if not isinstance(value, Mapping) or set(value) - known:
            raise _fail("speculative", value, f"an object with the keys {', '.join(sorted(known))}")
        return SpeculativeParams(**value)

    @property
    def is_greedy(self) -> bool:
        """True where no noise enters the choice."""
        return self.temperature < GREEDY_BELOW

    @property
    def structured_outputs_params(self) -> StructuredOutputsParams:
        """The normalised `structured_outputs` value of a request that has one."""
        assert isinstance(self.structured_outputs, StructuredOutputsParams)
        return self.structured_outputs

    @property
    def speculative_params(self) -> SpeculativeParams:
        """The normalised `speculative` value."""
        assert isinstance(self.speculative, SpeculativeParams)
        return self.speculative
