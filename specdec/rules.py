"""Rules: what one request's parameters mean for token ids, as small integer arrays.

They know ids and numbers; they know no scores, no tokenizer and no other request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.sampling_params import SamplingParams
from specdec.token_counts import Ints, TokenCounts

Floats = NDArray[np.float64]
_NO_IDS = np.zeros(0, np.int64)
_NO_NUMBERS = np.zeros(0, np.float64)


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that changes scores before the temperature does.

    allowed      the only ids that may be chosen; None: all
    bad_words    id sequences that may not be completed within the output
    stop_ids     ids that would end the output; they may not be chosen before min_tokens are out
    bias         added to the scores of bias_ids
    repetition   divides positive and multiplies negative scores of tokens in prompt or output
    presence     taken off the scores of tokens in the output
    frequency    taken off once for every time the token is in the output

    Derived: always_edits (True where scores change at every position) and longest_bad_word (in ids).
    """

    allowed: Ints | None
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    stop_ids: Ints
    bias_ids: Ints
    bias: Floats
    repetition: float
    presence: float
    frequency: float
    always_edits: bool = field(init=False)
    longest_bad_word: int = field(init=False)

    def __post_init__(self) -> None:
        edits = self.allowed is not None or self.bad_words or len(self.bias_ids) or self.penalises
        object.__setattr__(self, "always_edits", bool(edits))  # asked for every row of every step
        object.__setattr__(self, "longest_bad_word", max(map(len, self.bad_words), default=0))

    @classmethod
    def of(cls, params: SamplingParams, stop_token_ids: Iterable[int] = ()) -> Rules:
        """Resolve the parameters; bad words are words still, and come in later."""
        bias = dict(params.logit_bias or {})
        return cls(
            allowed=None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids)),
            bad_words=(),
            min_tokens=params.min_tokens or 0,
            stop_ids=np.array(sorted(stop_token_ids), np.int64) if params.min_tokens else _NO_IDS,
            bias_ids=np.fromiter(bias, np.int64, len(bias)) if bias else _NO_IDS,
            bias=np.fromiter(bias.values(), np.float64, len(bias)) if bias else _NO_NUMBERS,
            repetition=1.0 if params.repetition_penalty is None else params.repetition_penalty,
            presence=params.presence_penalty or 0.0,
            frequency=params.frequency_penalty or 0.0,
        )

    @property
    def penalises(self) -> bool:
        """True where scores depend on which tokens were seen before."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    def counts(self, prompt_token_ids: Sequence[int]) -> TokenCounts | None:
        """Counts to keep from the start of the output on; only repetition looks at the prompt."""
        if not self.penalises:
            return None
        return TokenCounts(prompt_token_ids if self.repetition != 1.0 else ())

    def edits(self, position: int) -> bool:
        """True where any score changes at this output position."""
        return self.always_edits or self._holds_back(position)

    def _holds_back(self, position: int) -> bool:
        return position < self.min_tokens and len(self.stop_ids) > 0

    def banned(self, position: int, last: Sequence[int]) -> Ints:
        """Ids that may not be chosen at an output position behind the output tokens `last`.

        last   as many of the latest output tokens as the longest bad word has, or all there are
        """
        words = [w[-1] for w in self.bad_words if len(w) == 1 or tuple(last[1 - len(w) :]) == w[:-1]]
        ids = np.array(words, np.int64) if words else _NO_IDS
        return np.concatenate([ids, self.stop_ids]) if self._holds_back(position) else ids
