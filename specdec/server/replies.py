"""OpenAI's reply shapes: a generation's deltas as whole replies or stream chunks of either endpoint.

It knows the names of fields in replies; it knows no sockets and no requests.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.request import RequestStats
from specdec.server.generation import Delta, Generation, Piece
from specdec.server.logprob_shapes import chat_logprobs, completion_logprobs
from specdec.server.protocol import GenerationBody
from specdec.server.token_text import TokenText
from specdec.server.tool_calls import ToolCall, ToolCallReader
from specdec.server.tools import Tools

Json = dict[str, Any]


class Shape(Protocol):
    """What differs between the endpoints."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def logprobs(self, pieces: Sequence[Piece], words: TokenText) -> Json:
        """Log-probabilities of some tokens."""
        ...

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A finished choice."""
        ...

    def opening(self, index: int) -> Json | None:
        """The choice of a first chunk that says who speaks; None where nobody does."""
        ...

    def chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A choice of a chunk."""
        ...


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def logprobs(self, pieces: Sequence[Piece], words: TokenText) -> Json:
        """Parallel lists."""
        return completion_logprobs(pieces, words)

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A finished choice."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, index: int) -> Json | None:
        """Completions have no roles."""
        return None

    def chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A choice of a chunk."""
        return self.whole_choice(index, text, finish_reason)


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, pieces: Sequence[Piece], words: TokenText) -> Json:
        """One entry a token."""
        return chat_logprobs(pieces, words)

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A finished choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, index: int) -> Json | None:
        """The role comes once, before any text."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A choice of a chunk; the one that ends carries no text."""
        delta = {"content": text} if finish_reason is None else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a reply carries only where the request asks for it.

    usage_in_chunks   every chunk tells the usage so far, not only the last
    """

    token_ids: bool = False
    token_sources: bool = False
    spec_metrics: bool = False
    usage: bool = False
    usage_in_chunks: bool = False

    @classmethod
    def of(cls, body: GenerationBody) -> Extras:
        """What this body asks for."""
        options = body.stream_options
        usage = options is not None and bool(options.include_usage)
        return cls(
            token_ids=bool(body.return_token_ids),
            token_sources=bool(body.return_token_sources),
            spec_metrics=bool(body.return_speculative_metrics),
            usage=usage,
            usage_in_chunks=usage and options is not None and bool(options.continuous_usage_stats),
        )


class Replies:
    """Writes the replies of one HTTP request.

    words   given where log-probabilities were asked for
    tools   given where an answer may call them (a chat)
    """

    def __init__(
        self, shape: Shape, model: str, extras: Extras, words: TokenText | None = None, tools: Tools | None = None
    ) -> None:
        self.id = f"{shape.id_prefix}{uuid.uuid4().hex}"
        self._shape = shape
        self._model = model
        self._asked = extras
        self._words = words
        self._created = int(time.time())
        self._tools = tools
        self._readers: dict[int, ToolCallReader] = {}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    # ------------------------------------------------------------------ whole

    def whole(self, generation: Generation, deltas: Iterable[Delta]) -> Json:
        """The reply that is not streamed; choices in the order of prompts."""
        pieces: list[list[Piece]] = [[] for _ in generation.choices]
        reasons: list[str | None] = [None] * len(pieces)
        for delta in deltas:
            pieces[delta.index] += delta.pieces
            reasons[delta.index] = delta.finish_reason
        reply = self._head(self._shape.whole_object)
        reply["choices"] = [self._whole_choice(i, own, reasons[i]) for i, own in enumerate(pieces)]
        reply["usage"] = usage(generation)
        return reply | self.metrics(generation)

    def _whole_choice(self, index: int, pieces: Sequence[Piece], reason: str | None) -> Json:
        text, calls = self._read(index, "".join(piece.text for piece in pieces), is_last=True)
        choice = self._shape.whole_choice(index, text, self._reason(index, reason)) | self._extras(pieces)
        if calls:
            choice["message"] |= {"content": text or None, "tool_calls": tool_calls(calls)}
        return choice

    def _read(self, index: int, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """New text of a choice as what is said and what is called."""
        if self._tools is None:
            return text, []
        if index not in self._readers:
            self._readers[index] = ToolCallReader(self._tools)
        return self._readers[index].push(text, is_last=is_last)

    def _reason(self, index: int, reason: str | None) -> str | None:
        reader = self._readers.get(index)
        return "tool_calls" if reader is not None and reader.num_calls and reason == "stop" else reason

    def _extras(self, pieces: Sequence[Piece]) -> Json:
        extras: Json = {}
        if self._words is not None:
            extras["logprobs"] = self._shape.logprobs(pieces, self._words)
        if self._asked.token_ids:
            extras["token_ids"] = [piece.token_id for piece in pieces if piece.source != "prompt"]
        if self._asked.token_sources:
            extras["tokens"] = [{"text": piece.text, "source": piece.source} for piece in pieces]
        return extras

    def metrics(self, generation: Generation) -> Json:
        """What speculation did for this request, where the request asks."""
        if not self._asked.spec_metrics:
            return {}
        return {"metrics": {"speculative_decoding": speculative_metrics(generation.stats)}}

    # ------------------------------------------------------------------ chunks

    def openings(self, generation: Generation) -> list[Json]:
        """The chunks before any text."""
        choices = (self._shape.opening(choice.index) for choice in generation.choices)
        return [self._chunk(generation, choice) for choice in choices if choice is not None]

    def chunks(self, generation: Generation, delta: Delta) -> list[Json]:
        """The chunks of one step of one choice: its text, then its end, if it ends."""
        made = []
        is_last = delta.finish_reason is not None
        first_call = self._readers[delta.index].num_calls if delta.index in self._readers else 0
        text, calls = self._read(delta.index, delta.text, is_last=is_last)
        extras = self._extras(delta.pieces)
        if text or (extras and delta.pieces):
            if self._asked.token_sources:
                extras |= {"num_draft_tokens": delta.num_drafted, "num_accepted_draft_tokens": delta.num_accepted}
            made.append(self._chunk(generation, self._shape.chunk_choice(delta.index, text, None) | extras))
        if calls:
            choice = self._shape.chunk_choice(delta.index, "", None)
            choice["delta"] = {"tool_calls": tool_calls(calls, first_call)}
            made.append(self._chunk(generation, choice))
        if is_last:
            reason = self._reason(delta.index, delta.finish_reason)
            made.append(self._chunk(generation, self._shape.chunk_choice(delta.index, "", reason)))
        return made

    def closing(self, generation: Generation) -> list[Json]:
        """The chunk behind all choices: usage and metrics, each only where asked for."""
        if not (self._asked.usage or self._asked.spec_metrics):
            return []
        chunk = self._chunk(generation, None) | self.metrics(generation)
        return [chunk | {"usage": usage(generation)} if self._asked.usage else chunk]

    def _chunk(self, generation: Generation, choice: Json | None) -> Json:
        chunk = self._head(self._shape.chunk_object)
        chunk["choices"] = [] if choice is None else [choice]
        if self._asked.usage:
            chunk["usage"] = usage(generation) if self._asked.usage_in_chunks else None
        return chunk


def tool_calls(calls: Sequence[ToolCall], first: int | None = None) -> list[Json]:
    """Calls in OpenAI's form; in a stream each says which call of the answer it is, counted from `first`."""
    return [
        ({} if first is None else {"index": first + i})
        | {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]


def usage(generation: Generation) -> Json:
    """Tokens read and written; a prompt counts once however many choices it has."""
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def speculative_metrics(stats: RequestStats) -> Json:
    """The per-request counts in the shape that load testers parse.

    acceptance_histogram[j] is the number of steps with drafts of which exactly j were accepted:
    "more than j - 1" less "more than j", both of which are counted.

    >>> stats = RequestStats()
    >>> stats.record(num_drafted=2, num_accepted=1, num_emitted=2)
    >>> speculative_metrics(stats)["acceptance_histogram"]
    [0, 1, 0]
    """
    at_least = [stats.num_drafts, *stats.accepted_per_pos, 0]
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - most for more, most in itertools.pairwise(at_least)],
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
    }
