"""AsyncEngine: one thread that steps the engine, and asyncio streams of what its requests gain.

It knows threads, queues and one event loop; it knows no text and no HTTP. The thread owns the
engine: everything that changes it arrives as a command between two steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from specdec.engine import Engine, link_choices
from specdec.errors import EngineDeadError, SpecdecError
from specdec.logprobs import TokenLogprob
from specdec.queue_delay import QueueDelay
from specdec.request import FinishReason, Request, StopMatcher
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Emitted

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class Gain:
    """What one request of a stream gained in one step.

    index          position of the request in its stream
    token_ids      new tokens; empty only where a fault ended the request
    num_drafted    drafts that were judged
    num_accepted   how many of token_ids, from the first on, came from the draft
    finish_reason  None while the request goes on
    error          what went wrong, with finish_reason ERROR
    joined_at      when the request's first step began, on time.monotonic()
    at             when this step ended
    logprobs       one a token, where they were asked for
    source         name of the proposer the drafts came from; "" without drafts
    """

    index: int
    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None
    error: str | None = None
    joined_at: float = 0.0
    at: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    num_rows           requests that took part
    num_tokens         tokens the target computed: prompt chunks, base tokens and drafts
    num_prompt_tokens  lengths of the prompts that were finished in this step
    """

    gains: tuple[Gain, ...]
    num_rows: int
    num_tokens: int
    num_prompt_tokens: int


@dataclass(slots=True)
class _Owner:
    """Where a request's gains go, and how far it was when last looked at."""

    stream: GainStream
    index: int
    joined_at: float | None = None
    num_computed_tokens: int = 0
    has_tokens: bool = False


class GainStream:
    """The gains of requests that were submitted together, in the order of the steps.

    It lives on the event loop, has one reader, and buffers whatever the reader has not taken yet,
    so a slow reader holds up nobody. Leaving the `with` block aborts what is unfinished.
    """

    def __init__(self, requests: Sequence[Request], on_close: Callable[[GainStream], None]) -> None:
        self.requests = tuple(requests)
        self.num_unfinished = len(self.requests)
        self.is_closed = False
        self._on_close = on_close
        self._gains: deque[Gain] = deque()
        self._news = asyncio.Event()
        self._error: SpecdecError | None = None

    def __aiter__(self) -> GainStream:
        return self

    async def __anext__(self) -> Gain:
        while not self._gains:
            if self._error is not None:
                raise self._error
            if self.is_closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._gains.popleft()

    def close(self, error: SpecdecError | None = None) -> None:
        """End the stream now; unfinished requests are aborted, once, however often this is called.

        error   raised to the reader instead of an ordinary end
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self.num_unfinished:
            self._gains.clear()
            self._error = error
        self._news.set()
        self._on_close(self)

    def __enter__(self) -> GainStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def push(self, gain: Gain) -> None:
        """Take news from the engine's thread (called on the loop)."""
        if self.is_closed:
            return
        self._gains.append(gain)
        self._news.set()
        if gain.finish_reason is not None:
            self.num_unfinished -= 1
            if self.num_unfinished == 0:
                self.close()


class AsyncEngine:
    """An engine on a thread of its own.

    on_step       called on the event loop after every step; a fault in it is logged and forgotten
    queue_delay   how long an idle engine waits for company; not at all unless told otherwise
    """

    def __init__(self, engine: Engine, *, on_step: Callable[[StepReport], None] | None = None) -> None:
        self.engine = engine
        self.on_step = on_step
        self.num_unfinished = 0
        self.queue_delay = QueueDelay(0.0)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[str, _Owner] = {}  # the thread's own
        self._streams: set[GainStream] = set()  # the loop's own
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()
        self._end: SpecdecError | None = None
        self._is_closing = False

    @property
    def is_alive(self) -> bool:
        """True while requests are taken; false before anybody hears of the fault that killed the engine."""
        return self._end is None and not self.engine.is_dead

    def start(self) -> None:
        """Start the thread, from inside the event loop it shall report to; `submit` does so by itself."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ on the event loop

    def make_requests(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        make_stop_matcher: Callable[[], StopMatcher] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Check one prompt and make its n requests; nothing is queued yet."""
        base_seed = self.engine.fresh_seed() if params.seed is None else None
        made = []
        for index in range(params.n):
            matcher = make_stop_matcher() if make_stop_matcher is not None else None
            request_id = f"request-{next(self._ids)}"
            request = self.engine.make_request(
                request_id, prompt_token_ids, params, index=index, base_seed=base_seed, stop_matcher=matcher
            )
            request.cache_salt = cache_salt
            made.append(request)
        link_choices(made)
        return made

    def submit(self, requests: Sequence[Request]) -> GainStream:
        """Queue requests and return the one stream of their gains."""
        self.start()
        stream = GainStream(requests, self._close_stream)
        self._send(lambda: self._add(stream))
        self._streams.add(stream)
        self.num_unfinished += len(stream.requests)
        return stream

    def _send(self, command: Callable[[], None]) -> None:
        with self._gate:  # after the end nothing enters the queue, so nothing can be forgotten in it
            if self._end is not None:
                raise self._end
            self._commands.put(command)

    def _close_stream(self, stream: GainStream) -> None:
        self._streams.discard(stream)
        self.num_unfinished -= len(stream.requests)
        if stream.num_unfinished and self._end is None:
            self._commands.put(lambda: self._abort(stream))

    def _dispatch(self, news: list[tuple[GainStream, Gain]], report: StepReport) -> None:
        for stream, gain in news:
            stream.push(gain)
        if self.on_step is not None:
            try:
                self.on_step(report)
            except Exception:
                logger.exception("counting a step failed; requests are not affected")

    def _fail_streams(self, error: SpecdecError) -> None:
        for stream in list(self._streams):
            stream.close(error)

    async def wait_until_idle(self) -> None:
        """Return when no request is unfinished."""
        while self.num_unfinished and self.is_alive:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Stop the thread after its current step; unfinished streams raise EngineDeadError."""
        self._is_closing = True
        self._commands.put(lambda: None)
        if self._thread is not None:
            self._thread.join()
        elif self._end is None:
            self._end = EngineDeadError("the engine was shut down")

    # ------------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        error: SpecdecError = EngineDeadError("the engine was shut down")
        try:
            while not self._is_closing:
                self._obey()
                if self.engine.has_work and not self._is_closing:
                    began_at = time.monotonic()
                    self._deliver(self.engine.step(), began_at)
                if self.engine.is_dead:
                    raise EngineDeadError("the engine failed twice in a row and has stopped; restart the server")
        except Exception as fault:
            logger.exception("the engine's thread ends")
            error = fault if isinstance(fault, EngineDeadError) else EngineDeadError(f"the engine stopped: {fault!r}")
        with self._gate:
            self._end = error
        self._tell_loop(lambda: self._fail_streams(error))
        for request_id in list(self._owners):
            self.engine.abort(request_id)

    def _obey(self) -> None:
        """Carry out the commands that have come in; wait for one where there is nothing else to do."""
        if not self.engine.has_work:
            self._commands.get()()
            self._gather()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _gather(self) -> None:
        """Wait for company as long as that is worth it."""
        while self.engine.has_work and not self._is_closing and (left := self.queue_delay.left(time.monotonic())):
            try:
                self._commands.get(timeout=left)()
            except queue.Empty:
                break
        self.queue_delay.note_start()

    def _add(self, stream: GainStream) -> None:
        self.queue_delay.note_arrival(time.monotonic())
        for index, request in enumerate(stream.requests):
            self._owners[request.request_id] = _Owner(stream, index)
            self.engine.add(request)

    def _abort(self, stream: GainStream) -> None:
        for request in stream.requests:
            if self._owners.pop(request.request_id, None) is not None:
                self.engine.abort(request.request_id)

    def _deliver(self, emitted: Sequence[Emitted], began_at: float) -> None:
        now = time.monotonic()
        news = []
        num_tokens = num_prompt_tokens = 0
        for one in emitted:
            request = one.request
            owner = self._owners.get(request.request_id)
            if owner is None:
                continue
            if owner.joined_at is None:
                owner.joined_at = began_at
                owner.num_computed_tokens = request.stats.num_cached_tokens
            num_tokens += max(request.num_computed_tokens - owner.num_computed_tokens, 0)
            num_tokens += one.num_drafted - one.num_accepted
            owner.num_computed_tokens = request.num_computed_tokens
            if one.token_ids or request.is_finished:
                num_prompt_tokens += 0 if owner.has_tokens else request.num_prompt_tokens
                owner.has_tokens = True
                news.append((owner.stream, _gain(one, owner, now)))
            if request.is_finished:
                del self._owners[request.request_id]
        report = StepReport(tuple(gain for _, gain in news), len(emitted), num_tokens, num_prompt_tokens)
        self._tell_loop(lambda: self._dispatch(news, report))

    def _tell_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._is_closing = True


def _gain(one: Emitted, owner: _Owner, now: float) -> Gain:
    request = one.request
    return Gain(
        owner.index,
        one.token_ids,
        one.num_drafted,
        one.num_accepted,
        request.finish_reason,
        request.error,
        joined_at=owner.joined_at or now,
        at=now,
        logprobs=one.logprobs,
        source=one.source,
    )
