"""`serve`: bind the port, start the engine, answer until a signal comes or the engine dies, leave cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn

from qengine import __version__
from qengine.config import EngineConfig
from qengine.errors import ConfigError, EngineDeadError
from qengine.server.app import create_app
from qengine.server.config import ServerConfig
from qengine.server.engine_client import ENGINE_FACTORY, EngineClient
from qengine.server.state import ServerState
from qengine.text import ChatTemplate
from qengine.text.chat_template import preload

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH_NOTICE_S = 5.0
"""How long /health still answers 503 with the reason after the engine died, before the process exits 1."""
KEEP_ALIVE_S = 75
"""Clients keep connections in pools; one that is closed too early fails their next request."""
CLOSING_S = 5.0
"""Time for the last answers (errors, when the limit is over) to leave the sockets."""


def serve(engine_config: EngineConfig, server_config: ServerConfig, *, factory: str = ENGINE_FACTORY) -> int:
    """Serve until SIGTERM or SIGINT (returns 0) or until the engine dies (returns 1).

    Raises UserError for what the user can mend (port, model, options). `factory`: see `protocol.Start`.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if server_config.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    if server_config.chat_template is not None:
        ChatTemplate.from_option(server_config.chat_template)  # what cannot be read must not cost a model's loading
    sock = bind(server_config.host, server_config.port)
    with contextlib.closing(sock):
        return asyncio.run(_serve(engine_config, server_config, sock, factory))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the engine is ready."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as e:
        reason = e.strerror or str(e)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", hint="another --port or --host") from e
    return sock


async def _serve(engine_config: EngineConfig, config: ServerConfig, sock: socket.socket, factory: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, stop.set)
    preloaded = loop.run_in_executor(None, preload)  # while the engine loads
    try:
        client = await _unless(stop, EngineClient.start(engine_config, factory=factory))
        if client is None:
            return 0
        try:
            for line in client.facts.report:
                print(line, file=sys.stderr)
            state = await loop.run_in_executor(None, ServerState, client, engine_config, config)
            await preloaded
            return await _answer(state, sock, stop)
        finally:
            await client.shutdown()
    except EngineDeadError as e:
        print(f"qengine: error: {e}", file=sys.stderr)
        return 1


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when `stop` came first, after `work` was cancelled."""
    job, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({job, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if job.done():
        return job.result()
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    return None


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of with a code."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _http_server(state: ServerState) -> _HttpServer:
    config = uvicorn.Config(
        create_app(state),
        lifespan="off",
        http="h11",
        ws="none",
        log_config=None,
        access_log=state.config.access_log,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(state.config.shutdown_timeout + CLOSING_S),
    )
    return _HttpServer(config)


async def _answer(state: ServerState, sock: socket.socket, stop: asyncio.Event) -> int:
    """Listen; after a signal let running requests finish within the limit, then end them with an error."""
    client, limit = state.client, state.config.shutdown_timeout
    server = _http_server(state)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        host, port = sock.getsockname()[:2]
        print(_ready_line(host, port, state.names), flush=True)
    dead, stopped = asyncio.create_task(client.dead.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait({serving, dead, stopped}, return_when=asyncio.FIRST_COMPLETED)
    engine_died = dead.done()
    if engine_died:
        print(f"qengine: error: {client.death}", file=sys.stderr, flush=True)
        await asyncio.wait({stopped}, timeout=DEATH_NOTICE_S)
    server.should_exit = True
    loop = asyncio.get_running_loop()
    give_up = functools.partial(client.give_up, "the server is shutting down")
    timer = loop.call_later(limit, give_up)
    for signum in SIGNALS:  # a second signal ends the patience
        loop.add_signal_handler(signum, give_up)
    try:
        await serving
    except OSError as e:
        raise ConfigError(f"cannot listen: {e.strerror or e}", hint="another --port or --host") from e
    finally:
        timer.cancel()
        dead.cancel()
        stopped.cancel()
    return 1 if engine_died else 0


def _ready_line(host: str, port: int, names: tuple[str, ...]) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"qengine {__version__} serves {', '.join(names)} at http://{shown}:{port}/v1 (Ctrl-C stops it)"
