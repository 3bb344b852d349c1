"""The command line: flags to an engine, an app and a server that ends properly.

It knows the order of start and stop; every decision behind the flags is made elsewhere. What is
heavy (torch, the engine) is imported while the server already listens, so that --help costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from specdec import __version__
from specdec.errors import SpecdecError
from specdec.server.flags import model_name, parse_config, parse_flags, parse_options, unknown_variables
from specdec.server.options import ServerOptions
from specdec.server.startup import LoadingApp
from specdec.server.wire import wire_config
from specdec.threads import prepare_environment

if TYPE_CHECKING:
    from specdec.async_engine import AsyncEngine

logger = logging.getLogger("specdec.server")


class DrainingServer(uvicorn.Server):
    """A server whose first signal lets running requests end, and whose second does not.

    uvicorn alone would stop listening at once; here new requests hear 503 while the others end.
    """

    def __init__(self, config: uvicorn.Config, app: LoadingApp, drain_seconds: float) -> None:
        super().__init__(config)
        self._app = app
        self._app.on_end = self._after_loading
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in getattr(self, "servers", ()):
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                logger.info("listening: http://%s:%d/v1 (the page is at /, metrics at /metrics)", host, port)

    @property
    def loading_error(self) -> BaseException | None:
        """Why there is nothing to serve, if so."""
        return self._app.error

    @property
    def is_loading(self) -> bool:
        """True while the thread that loads is at work."""
        return self._app.is_loading

    def _after_loading(self) -> None:
        if self._app.error is not None:
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, stop on the second; the exit code is 0 either way."""
        serving = self._app.serving
        if self._loop is None or serving is None or serving.admission.is_draining:
            self.should_exit = self.force_exit = True
            return
        serving.admission.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_drain, serving.engine)

    def _begin_drain(self, engine: AsyncEngine) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drain_then_stop(engine))

    async def _drain_then_stop(self, engine: AsyncEngine) -> None:
        logger.info("told to stop: %d requests may end within %g s", engine.num_unfinished, self._drain_seconds)
        try:
            await asyncio.wait_for(engine.wait_until_idle(), self._drain_seconds)
        except asyncio.TimeoutError:
            logger.warning("%d requests are cut off: their time is over", engine.num_unfinished)
            engine.close()
        self.should_exit = True


def make_server(load: Callable[[], FastAPI], options: ServerOptions, host: str, port: int) -> DrainingServer:
    """The server of the app that `load` makes (see `create_app`); it listens before that is done."""
    app = LoadingApp(load)
    config = wire_config(app, host, port, timeout_graceful_shutdown=2)
    return DrainingServer(config, app, options.drain_timeout_seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server and stay until it is told to stop."""
    prepare_environment(os.environ)
    args = parse_flags(argv, os.environ)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        options, name = parse_options(args), model_name(args)
    except SpecdecError as error:
        raise SystemExit(f"specdec-serve: {error}") from error
    for variable in unknown_variables(os.environ):
        logger.warning("the variable %s is no flag of this server and changes nothing; --help lists them", variable)
    _summarise(name, args.draft, options)

    def load() -> FastAPI:
        from specdec.assembly import build
        from specdec.async_engine import AsyncEngine
        from specdec.server.app import create_app

        return create_app(AsyncEngine(build(parse_config(args))), name, options)

    server = make_server(load, options, args.host, args.port)
    server.run()
    if server.is_loading:  # native code that is left running while Python ends would abort the process
        logging.shutdown()
        os._exit(0)
    fault = server.loading_error
    if isinstance(fault, SpecdecError):
        raise SystemExit(f"specdec-serve: {fault}")
    if fault is not None:
        raise fault


def _summarise(name: str, draft: str, options: ServerOptions) -> None:
    """What is about to be served; the engine tells its capacity itself."""
    logger.info("specdec %s serves %r with draft %r", __version__, name, draft)
    logger.info(
        "API keys: %s; at most %d requests wait; %s",
        len(options.api_keys) or "none, the door is open",
        options.max_waiting,
        f"a request may take {options.request_timeout_seconds:g} s"
        if options.request_timeout_seconds
        else "no time limit for a request",
    )
