"""One HTTP request's generation: its choices, their text as it grows, and the counts for `usage`.

It knows tokens, text and streams of gains; it knows neither JSON nor which endpoint asked.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from specdec.async_engine import AsyncEngine, Gain, GainStream
from specdec.errors import InvalidRequestError, RequestFailedError
from specdec.request import FinishReason, Request, RequestStats
from specdec.sampling_params import SamplingParams
from specdec.tokenizer import OutputText, Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text that it made certain.

    source   "draft" (accepted), "recovered" (the target's word where a draft was refused), "bonus"
             (the target's word behind an accepted run) or "plain" (nothing was drafted)
    """

    token_id: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained in one step."""

    index: int
    pieces: tuple[Piece, ...]
    finish_reason: str | None

    @property
    def text(self) -> str:
        """The new text, stop strings cut out."""
        return "".join(piece.text for piece in self.pieces)


def sources(gain: Gain) -> list[str]:
    """Where each token of a gain came from.

    >>> sources(Gain(0, (5, 6, 7), 4, 2, None, None))
    ['draft', 'draft', 'recovered']
    """
    own = "plain" if not gain.num_drafted else "bonus" if gain.num_accepted == gain.num_drafted else "recovered"
    return ["draft" if i < gain.num_accepted else own for i in range(len(gain.token_ids))]


class Choice:
    """One choice while it runs: its request and the reader's own copy of its text."""

    def __init__(self, index: int, request: Request, text: OutputText | None) -> None:
        self.index = index
        self.request = request
        self._text = text

    def take(self, gain: Gain) -> Delta:
        """Turn a gain into text."""
        is_last = gain.finish_reason is not None
        ends = [False] * (len(gain.token_ids) - 1) + [is_last]
        pieces = [
            Piece(token_id, self._push(token_id, end), source)
            for token_id, source, end in zip(gain.token_ids, sources(gain), ends)
        ]
        return Delta(self.index, tuple(pieces), gain.finish_reason.value if gain.finish_reason else None)

    def _push(self, token_id: int, is_last: bool) -> str:
        if self._text is None:
            return ""
        self._text.push(token_id)
        if is_last:
            self._text.finish()
        return self._text.take(is_last=is_last)


class Generation:
    """All choices of one HTTP request; iterate to get their deltas, close to abort.

    choices are ordered by prompt, then by n: index = prompt * n + j.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], choices: Sequence[Choice], stream: GainStream) -> None:
        self.num_prompt_tokens = sum(map(len, prompts))
        self.choices = tuple(choices)
        self.num_output_tokens = 0
        self.started = time.monotonic()
        self._stream = stream

    @property
    def was_cut(self) -> bool:
        """True when the stream was closed before its end."""
        return self._stream.is_closed and self._stream.num_unfinished > 0

    @property
    def stats(self) -> RequestStats:
        """What speculation did, summed over the choices; whole once all are finished."""
        total = RequestStats()
        for choice in self.choices:
            total.add(choice.request.stats)
        return total

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared, counted once a prompt."""
        firsts = self.choices[:: self.choices[0].request.params.n]
        return sum(choice.request.stats.num_cached_tokens for choice in firsts)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for gain in self._stream:
            if gain.finish_reason is FinishReason.ERROR:
                self.close()
                raise RequestFailedError(gain.error or "the request failed")
            self.num_output_tokens += len(gain.token_ids)
            yield self.choices[gain.index].take(gain)

    def close(self) -> None:
        """Abort what is unfinished; harmless afterwards."""
        self._stream.close()


def start(
    engine: AsyncEngine,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    cache_salt: str | None = None,
) -> Generation:
    """Check every prompt first, then queue all of them."""
    if params.stop_strings and tokenizer is None:
        raise InvalidRequestError("stop needs text, and the target has no tokenizer; use stop_token_ids", param="stop")

    def make_text() -> OutputText | None:
        if tokenizer is None:
            return None
        return OutputText(tokenizer, params.stop_strings, skip_special_tokens=params.skip_special_tokens)

    matcher = cast("Callable[[], OutputText]", make_text) if params.stop_strings else None
    requests = [
        request
        for prompt in prompts
        for request in engine.make_requests(prompt, params, matcher, cache_salt=cache_salt)
    ]
    choices = [Choice(index, request, make_text()) for index, request in enumerate(requests)]
    return Generation(prompts, choices, engine.submit(requests))
