"""What the server's tests share: apps in process, apps on a loopback port, and checks for the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import httpx
import uvicorn

from specdec.async_engine import AsyncEngine
from specdec.engine import Engine
from specdec.server.app import create_app
from specdec.server.options import ServerOptions
from specdec.server.wire import wire_config

NAME = "toy"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run one test's coroutine; on a busy machine too, nothing here may take longer than a minute."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@contextlib.asynccontextmanager
async def serving(engine: Engine, options: ServerOptions | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app in this process; afterwards the engine must be idle and whole."""
    async_engine = AsyncEngine(engine)
    app = create_app(async_engine, NAME, options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client
    finally:
        async_engine.close()
        assert_at_rest(engine)


def assert_at_rest(engine: Engine) -> None:
    """Nothing runs, nothing waits, every block is back."""
    scheduler = engine.scheduler
    assert not scheduler.running and not scheduler.waiting
    scheduler.check_integrity()
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks


@contextlib.contextmanager
def live_server(engine: Engine, options: ServerOptions | None = None) -> Iterator[str]:
    """A real uvicorn on a free loopback port, in a thread of its own; gives its address."""
    app = create_app(AsyncEngine(engine), NAME, options)
    server = uvicorn.Server(wire_config(app, "127.0.0.1", 0, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        wait_for(lambda: not engine.has_work)
    finally:
        server.should_exit = True
        thread.join(60)
    assert_at_rest(engine)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; [DONE] must come once, last."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The joined text of every choice of a stream."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + (piece or "")
    return joined
