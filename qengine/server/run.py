"""`serve`: bind the port, start the engine, answer until a signal comes or the engine dies, leave cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from qengine.config import EngineConfig
from qengine.errors import ConfigError, EngineDeadError
from qengine.server.config import ServerConfig
from qengine.server.engine_client import ENGINE_FACTORY, EngineClient
from qengine.server.parent_watch import SIGNALS
from qengine.text import ChatTemplate
from qengine.text.chat_template import preload

SIGNALLED = 128
"""Exit codes of what a signal ended are this and the signal's number, as shells have it: 130 and 143."""
T = TypeVar("T")
Answer = Callable[[EngineClient, EngineConfig, ServerConfig, socket.socket, asyncio.Event], Awaitable[int]]


def serve(engine_config: EngineConfig, server_config: ServerConfig, *, factory: str = ENGINE_FACTORY) -> int:
    """Serve until SIGTERM or SIGINT (returns 0, or 128 and the signal where the engine was not ready yet) or until the
    engine dies (returns 1).

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
    came: list[int] = []

    def stopped(signum: int) -> None:
        came.append(signum)
        stop.set()

    for signum in SIGNALS:
        loop.add_signal_handler(signum, stopped, signum)
    imported = loop.run_in_executor(None, _import_answer)
    try:
        client = await _unless(stop, EngineClient.start(engine_config, factory=factory))
        if client is None:
            print("qengine: stopped by a signal before the engine was ready", file=sys.stderr)
            return SIGNALLED + came[0]
        try:
            for line in client.facts.report:
                print(line, file=sys.stderr)
            answer = await imported
            return await answer(client, engine_config, config, sock, stop)
        finally:
            await client.shutdown()
    except EngineDeadError as e:
        print(f"qengine: error: {e}", file=sys.stderr)
        return 1


def _import_answer() -> Answer:
    """Seconds of imports, done in a thread while the engine loads."""
    from qengine.server.http_server import answer

    preload()
    return answer


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
