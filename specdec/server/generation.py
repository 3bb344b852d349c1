"""One HTTP request's generation: its choices, their text as it grows, and the counts for `usage`.

It knows tokens, text and streams of gains; it knows neither JSON nor which endpoint asked.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from specdec.async_engine import AsyncEngine, Gain, GainStream
from specdec.errors import InvalidRequestError, RequestFailedError, SpecdecError
from specdec.logprobs import TokenLogprob
from specdec.metrics import Metrics
from specdec.request import LEFT_GRAMMAR, FinishReason, Request, RequestStats
from specdec.sampling_params import SamplingParams
from specdec.tokenizer import Detokenizer, OutputText, Tokenizer


class Piece(NamedTuple):
    """One token and the text that it made certain.

    source    "draft" (accepted), "recovered" (the target's word where a draft was refused), "bonus"
              (the target's word behind an accepted run), "plain" (nothing was drafted) or "prompt" (echoed)
    offset    where its text begins in the text of the choice
    logprob   None where it was not asked for, and for the first token of a prompt
    """

    token_id: int
    text: str
    source: str
    offset: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained in one step.

    num_drafted, num_accepted   drafts of this step that were judged, and judged right
    """

    index: int
    pieces: tuple[Piece, ...]
    finish_reason: str | None
    num_drafted: int
    num_accepted: int

    @property
    def text(self) -> str:
        """The new text, stop strings cut out."""
        return "".join(piece.text for piece in self.pieces)


def sources(gain: Gain) -> list[str]:
    """Where each token of a gain came from.

    >>> sources(Gain(0, (5, 6, 7), 4, 2, None, None))
    ['draft', 'draft', 'recovered']
    """
    if not gain.num_drafted:
        return ["plain"] * len(gain.token_ids)
    own = "bonus" if gain.num_accepted == gain.num_drafted else "recovered"
    return ["draft" if i < gain.num_accepted else own for i in range(len(gain.token_ids))]


class Choice:
    """One choice while it runs: its request and the reader's own copy of its text.

    echo           set to let the prompt come before the output
    drops_output   set where only the echoed prompt is wanted
    """

    def __init__(self, index: int, request: Request, text: OutputText | None, echo: Detokenizer | None = None) -> None:
        self.index = index
        self.request = request
        self.last_at: float | None = None
        self._text = text
        self.drops_output = False
        self._echo = echo
        self._length = 0

    @property
    def is_first(self) -> bool:
        """True for one choice of every prompt."""
        return self.index % self.request.params.n == 0

    def take(self, gain: Gain) -> Delta:
        """Turn a gain into text."""
        is_last = gain.finish_reason is not None
        ends = [False] * (len(gain.token_ids) - 1) + [is_last]
        logprobs = gain.logprobs or (None,) * len(gain.token_ids)
        pieces = self._take_prompt()
        for token_id, source, logprob, end in zip(gain.token_ids, sources(gain), logprobs, ends):
            if not self.drops_output:
                pieces.append(self._piece(token_id, self._push(token_id, end), source, logprob))
        reason = gain.finish_reason.value if gain.finish_reason else None
        return Delta(self.index, tuple(pieces), reason, gain.num_drafted, gain.num_accepted)

    def _take_prompt(self) -> list[Piece]:
        """The echoed prompt, once, before the first token; by then the target has judged all of it."""
        echo, self._echo = self._echo, None
        if echo is None:
            return []
        request = self.request
        prompt = request.token_ids[: request.num_prompt_tokens]
        judged = request.prompt_logprobs if request.params.prompt_logprobs is not None else [None] * len(prompt)
        texts = [echo.push(token_id) for token_id in prompt]
        texts[-1] += echo.flush()
        return [self._piece(t, text, "prompt", p) for t, text, p in zip(prompt, texts, judged, strict=True)]

    def _piece(self, token_id: int, text: str, source: str, logprob: TokenLogprob | None) -> Piece:
        piece = Piece(token_id, text, source, self._length, logprob)
        self._length += len(text)
        return piece

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
    arrived_at   when the HTTP request came in, on time.monotonic()
    on_end       called once, when the generation is over, however it ends
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        stream: GainStream,
        metrics: Metrics,
        *,
        arrived_at: float,
        on_end: Callable[[Generation], None] = lambda generation: None,
    ) -> None:
        self.choices = tuple(choices)
        self.num_output_tokens = 0
        self.arrived_at = arrived_at
        self.first_token_at: float | None = None
        self.reasons: dict[int, str] = {}
        self._stream = stream
        self._metrics = metrics
        self._on_end = on_end
        self._is_over = False

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
    def _firsts(self) -> list[Request]:
        """One request a prompt."""
        return [choice.request for choice in self.choices if choice.is_first]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, counted once a prompt."""
        return sum(request.num_prompt_tokens for request in self._firsts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared, counted once a prompt."""
        return sum(request.stats.num_cached_tokens for request in self._firsts)

    def summary(self) -> dict[str, Any]:
        """Numbers for the log; no text."""
        stats, first = self.stats, self.first_token_at
        return {
            "choices": len(self.choices),
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "finish_reasons": [self.reasons[index] for index in sorted(self.reasons)],
            "first_token_seconds": round(first - self.arrived_at, 4) if first is not None else None,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
            "draft_acceptance_rate": round(stats.acceptance_rate, 3),
        }

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for gain in self._stream:
            self._count(gain)
            if gain.finish_reason is FinishReason.ERROR:
                self.close()
                raise _failure(gain.error or "the request failed")
            yield self.choices[gain.index].take(gain)

    def _count(self, gain: Gain) -> None:
        choice = self.choices[gain.index]
        self.num_output_tokens += 0 if choice.drops_output else len(gain.token_ids)
        if choice.last_at is None:
            self._metrics.count_first_token(gain.joined_at - self.arrived_at, gain.at - self.arrived_at)
            self.first_token_at = self.first_token_at or gain.at
        else:
            self._metrics.count_gap(gain.at - choice.last_at)
        choice.last_at = gain.at
        if gain.finish_reason is not None:
            self.reasons[gain.index] = gain.finish_reason.value
            self._metrics.count_end(gain.finish_reason.value, gain.at - self.arrived_at)

    def cut(self, error: SpecdecError) -> None:
        """End now; the reader gets the error."""
        self._stream.close(error)

    def close(self) -> None:
        """Abort what is unfinished; harmless afterwards."""
        self._stream.close()
        if self._is_over:
            return
        self._is_over = True
        for choice in self.choices:
            if choice.index not in self.reasons:
                self.reasons[choice.index] = FinishReason.ABORT.value
                self._metrics.count_end(FinishReason.ABORT.value, time.monotonic() - self.arrived_at)
        self._on_end(self)


def _failure(message: str) -> SpecdecError:
    """Who is to blame for a request that ended in a step: a grammar that cannot be walked is its sender's."""
    if message.startswith(LEFT_GRAMMAR):
        return InvalidRequestError(message, param="structured_outputs")
    return RequestFailedError(message)


def make_choices(
    engine: AsyncEngine,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    cache_salt: str | None = None,
    echo: bool = False,
) -> list[Choice]:
    """Check every prompt and make its choices; nothing is queued yet."""
    if tokenizer is None and (params.stop_strings or echo):
        param = "echo" if echo else "stop"
        raise InvalidRequestError(f"{param} needs text, and the target has no tokenizer", param=param)
    skip = params.skip_special_tokens

    def make_text() -> OutputText | None:
        if tokenizer is None:
            return None
        stop, least = params.stop_strings, params.min_tokens or 0
        return OutputText(tokenizer, stop, skip_special_tokens=skip, min_tokens=least)

    def make_echo() -> Detokenizer | None:
        return Detokenizer(tokenizer, skip_special_tokens=skip) if echo and tokenizer is not None else None

    matcher = cast("Callable[[], OutputText]", make_text) if params.stop_strings else None
    requests = [
        request
        for prompt in prompts
        for request in engine.make_requests(prompt, params, matcher, cache_salt=cache_salt)
    ]
    return [Choice(index, request, make_text(), make_echo()) for index, request in enumerate(requests)]
