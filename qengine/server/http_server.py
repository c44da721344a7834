"""The HTTP side once the engine is ready: listen, answer, and after a signal or the engine's death close in order.

Importing it (FastAPI, uvicorn) takes a second: `run` does so while the engine loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import sys

import uvicorn

from qengine import __version__
from qengine.config import EngineConfig
from qengine.errors import ConfigError, ShuttingDownError
from qengine.server.app import create_app
from qengine.server.config import ServerConfig
from qengine.server.engine_client import EngineClient
from qengine.server.parent_watch import SIGNALS
from qengine.server.state import ServerState

DEATH_NOTICE_S = 5.0
"""How long /health still answers 503 with the reason after the engine died, before the process exits 1."""
KEEP_ALIVE_S = 75
"""Clients keep connections in pools; one that is closed too early fails their next request."""
CLOSING_S = 5.0
"""Time for the last answers (errors, when the limit is over) to leave the sockets."""


async def answer(
    client: EngineClient, engine_config: EngineConfig, config: ServerConfig, sock: socket.socket, stop: asyncio.Event
) -> int:
    """Listen on `sock`; after `stop` let running requests finish within the limit, then end them with an error.

    Returns the exit code: 0, or 1 when the engine died. Raises UserError (ServerState's, or a port that is taken).
    """
    state = await asyncio.get_running_loop().run_in_executor(None, ServerState, client, engine_config, config)
    limit = config.shutdown_timeout
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
    if client.streams and not engine_died:
        print(f"qengine: finishing {len(client.streams)} request(s), {limit:g} s at most", file=sys.stderr, flush=True)
    give_up = functools.partial(client.give_up, ShuttingDownError())
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


def _ready_line(host: str, port: int, names: tuple[str, ...]) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"qengine {__version__} serves {', '.join(names)} at http://{shown}:{port}/v1 (Ctrl-C stops it)"
