"""Serving: from a body to an answer, for both endpoints.

It connects the shapes of requests, the generation and the shapes of replies; it knows no routes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from specdec.async_engine import AsyncEngine
from specdec.errors import InvalidRequestError
from specdec.metrics import Metrics
from specdec.request import Request as EngineRequest
from specdec.sampling_params import SamplingParams
from specdec.server.admission import Admission
from specdec.server.body import parse_object
from specdec.server.errors import HTTPError, as_http_error, error_body
from specdec.server.generation import Choice, Generation, make_choices
from specdec.server.options import ServerOptions
from specdec.server.protocol import ChatBody, CompletionBody, GenerationBody, read_messages, read_prompts
from specdec.server.refusals import read_body, speaking_of
from specdec.server.replies import ChatShape, CompletionShape, Extras, Replies, Shape
from specdec.server.streaming import DONE, EventStream, event, watch_client
from specdec.server.structured import naming, shape_field
from specdec.server.token_text import TokenText
from specdec.server.tools import Tools, check_template, in_words, knows_calls
from specdec.tokenizer import Tokenizer

logger = logging.getLogger("specdec.server")

OFFLOAD_ABOVE = 2000
"""Texts of more characters are encoded on a helper thread."""

T = TypeVar("T")

MAX_LOGGED_TOKENS = 2000
"""Of a prompt that is logged at all (log_prompts)."""

MAX_LOGGED_FIELDS = 1000
"""Unknown field names said in the log; beyond them the log would be the client's."""


class Serving:
    """One served model: its engine, its tokenizer, its name and who may use it now."""

    def __init__(self, engine: AsyncEngine, name: str, options: ServerOptions) -> None:
        self.engine = engine
        self.name = name
        self.options = options
        self.admission = Admission(engine, options.max_waiting, options.max_requests_per_key)
        self.metrics = Metrics(engine.engine)
        engine.engine.grammars.prepare()
        inner = engine.engine.target.model.tokenizer
        self.tokenizer = Tokenizer(inner) if inner is not None else None
        self._words = TokenText(self.tokenizer) if self.tokenizer is not None else None
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="specdec-text")
        self._compiler = ThreadPoolExecutor(2, thread_name_prefix="specdec-grammar")
        self._logged_fields: set[str] = set()

    # ------------------------------------------------------------------ endpoints

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at = time.monotonic()
        body = read_body(CompletionBody, parse_object(await request.body()))
        self._check(body)
        params = body.sampling_params()
        given = read_prompts(body.prompt)
        self.admission.check_room(len(given) * params.n, request.state.key)
        await self._compile(body, params)
        prompts = await self.encode(given)
        choices = make_choices(
            self.engine, self.tokenizer, prompts, params, cache_salt=body.cache_salt, echo=bool(body.echo)
        )
        for choice in choices:
            choice.drops_output = body.only_echoes
        return await self._answer(request, body, self._start(request, choices, arrived_at), CompletionShape())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at = time.monotonic()
        body = read_body(ChatBody, parse_object(await request.body()))
        self._check(body)
        params = body.sampling_params()
        self.admission.check_room(params.n, request.state.key)
        tools = body.read_tools()
        await self._compile(body, params)
        prompt = await self.encode_chat(read_messages(body.messages), tools)
        try:
            with speaking_of(body.name_of_limit, "max_tokens"):
                choices = make_choices(self.engine, self.tokenizer, [prompt], params, cache_salt=body.cache_salt)
        except InvalidRequestError as error:
            error.param = "messages" if error.param == "prompt" else error.param
            raise
        return await self._answer(request, body, self._start(request, choices, arrived_at), ChatShape(), tools)

    # ------------------------------------------------------------------ the way in

    def _check(self, body: GenerationBody) -> None:
        self.admission.check_open()
        self.check_model(body.model)
        for name in body.unknown_fields:
            if name not in self._logged_fields and len(self._logged_fields) < MAX_LOGGED_FIELDS:
                self._logged_fields.add(name)
                logger.warning("the request field %r is unknown and ignored (said once a name)", name[:100])

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served here; no name means the one that is."""
        if name is not None and name != self.name:
            message = f"model {name[:100]!r} is not served here; {self.name!r} is"
            raise HTTPError(404, message, param="model", code="model_not_found")

    def _start(self, request: Request, choices: Sequence[Choice], arrived_at: float) -> Generation:
        key, summary = request.state.key, request.state.summary
        self.admission.check_room(len(choices), key)
        for choice in choices:
            choice.request.owner = None if key is None else f"key {key}"
        stream = self.engine.submit([choice.request for choice in choices])
        self.admission.enter(len(choices), key)
        if self.options.log_prompts:
            summary["prompts"] = [self._readable(choice.request) for choice in choices if choice.is_first]
        seconds = self.options.request_timeout_seconds
        error = HTTPError(504, f"the request took longer than {seconds:g} s, the limit of this server", code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, stream.close, error) if seconds else None

        def on_end(generation: Generation) -> None:
            self.admission.leave(len(choices), key)
            if timer is not None:
                timer.cancel()
            summary.update(generation.summary())

        return Generation(choices, stream, self.metrics, arrived_at=arrived_at, on_end=on_end)

    def _readable(self, request: EngineRequest) -> str | list[int]:
        token_ids = request.token_ids[: min(request.num_prompt_tokens, MAX_LOGGED_TOKENS)]
        return token_ids if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def encode(self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of prompts; ids pass as they are."""

        def encode_all() -> list[list[int]]:
            return [
                p if isinstance(p, list) else tokenizer.encode(p, add_special_tokens=add_special_tokens)
                for p in prompts
            ]

        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise InvalidRequestError(
                "prompt is a text, and the target has no tokenizer; send token ids", param="prompt"
            )
        tokenizer = cast("Tokenizer", self.tokenizer)
        return await self.offload(sum(map(len, texts)), encode_all)

    async def _compile(self, body: GenerationBody, params: SamplingParams) -> None:
        """Compile a grammar beside the event loop and the steps; making the requests then finds it ready."""
        if params.structured_outputs is None:
            return
        compile_it = self.engine.engine.grammars.compile
        with naming(shape_field(body.__dict__) or "tools"):  # without a shape of its own, a call is demanded
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiler, compile_it, params.structured_outputs_params)

    async def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Tools | None = None) -> list[int]:
        """Token ids of a conversation; tools are told as the model's template does, or in our words."""
        if self.tokenizer is None:
            raise InvalidRequestError("the target has no tokenizer; use completions with token ids", param="messages")
        if tools is not None and check_template(self.tokenizer.chat_template):
            size = len(str(tools.definitions))
            encode = functools.partial(self.tokenizer.encode_chat, messages, tools=tools.definitions)
        else:
            if tools is not None or not knows_calls(self.tokenizer.chat_template):
                messages = in_words(messages, tools)
            size = 0
            encode = functools.partial(self.tokenizer.encode_chat, messages)
        return await self.offload(size + sum(len(message["content"]) for message in messages), encode)

    async def offload(self, size: int, work: Callable[[], T]) -> T:
        """Do text work of `size` characters or tokens: large work beside the event loop, so that it goes on."""
        if size <= OFFLOAD_ABOVE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._helper, work)

    # ------------------------------------------------------------------ the way out

    async def _answer(
        self,
        request: Request,
        body: GenerationBody,
        running: Generation,
        shape: Shape,
        tools: Tools | None = None,
    ) -> Response:
        asks_logprobs = running.choices[0].request.params.logprobs is not None
        replies = Replies(shape, self.name, Extras.of(body), self._words if asks_logprobs else None, tools)
        if body.stream:
            events = self._events(running, replies)
            return EventStream(events, running.close, keep_alive_seconds=self.options.keep_alive_seconds)
        watch = asyncio.create_task(watch_client(request.receive, running.close))
        try:
            deltas = [delta async for delta in running]
            if running.was_cut:
                return Response(status_code=499)  # nobody is there to read it
            return JSONResponse(replies.whole(running, deltas))
        finally:
            running.close()
            watch.cancel()

    async def _events(self, running: Generation, replies: Replies) -> AsyncIterator[bytes]:
        for chunk in replies.openings(running):
            yield event(chunk)
        try:
            async for delta in running:
                for chunk in replies.chunks(running, delta):
                    yield event(chunk)
        except Exception as error:
            fault = as_http_error(error)
            if fault.status >= 500:
                logger.error("a stream ended with an error: %s", error)
            yield event(error_body(fault))
        else:
            for chunk in replies.closing(running):
                yield event(chunk)
        yield DONE
