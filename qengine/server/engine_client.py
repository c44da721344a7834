"""The HTTP process's end of the engine: starts its process, sends requests, hands outputs to whoever waits for them.

A request lives as long as its `RequestStream` context: leaving it, for whatever reason, aborts what is unfinished,
and this is the only place where aborts come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from qengine.config import EngineConfig
from qengine.errors import EngineDeadError, ShuttingDownError, UserError
from qengine.messages import Abort, EngineStats, NewRequest, RequestOutput, StepOutputs
from qengine.runtime.facts import EngineFacts
from qengine.server.parent_watch import CLEAN_UP_S, SIGNALS
from qengine.server.protocol import Died, FromEngine, Ready, Start, StartFailed, Stop, ToEngine

ENGINE_FACTORY = "qengine.server.engine_process:build_engine"
HEARTBEAT_S = 0.5
STOP_TIMEOUT_S = 10.0
"""An engine that has not left its loop so long after Stop is killed."""

LAST_WORDS_S = 5.0
"""How long to wait for the message that explains why a process has ended."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qengine.server.engine_process import main; main(sys.argv[2])"
)
_SOCKET_PATH_ROOM = 70
"""Longest temporary folder that still leaves a Unix socket's path below the system's limit (107 bytes)."""


@dataclass(frozen=True)
class Health:
    """`reason` is None when the engine is well. Ages in seconds."""

    reason: str | None
    heartbeat_age_s: float
    progress_age_s: float


class RequestStream:
    """Outputs of one or more requests, in the order they come; ends when all have finished.

    Async context manager and iterator. Raises EngineDeadError when the engine ends first.
    """

    def __init__(self, client: EngineClient, requests: Sequence[NewRequest]) -> None:
        self._client = client
        self._requests = requests
        self._open = {r.request_id for r in requests}
        self._queue: asyncio.Queue[RequestOutput | EngineDeadError] = asyncio.Queue()

    async def __aenter__(self) -> RequestStream:
        self._client.check_alive()
        for request in self._requests:
            self._client.streams[request.request_id] = self
            self._client.send(request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort(list(self._open))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; nothing more comes from them. Finished and unknown ids are ignored."""
        gone = [i for i in request_ids if i in self._open]
        self._open.difference_update(gone)
        for request_id in gone:
            self._client.streams.pop(request_id, None)
        if gone:
            with contextlib.suppress(EngineDeadError):
                self._client.send(Abort(request_ids=gone))

    def put(self, item: RequestOutput | EngineDeadError) -> None:
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while self._open:
            item = await self._queue.get()
            if isinstance(item, EngineDeadError):
                raise item
            if item.request_id not in self._open:
                continue
            if item.finish_reason is not None:
                self._open.discard(item.request_id)
                self._client.streams.pop(item.request_id, None)
            yield item


class EngineClient:
    """One engine process. Create it with `EngineClient.start`; all methods belong to that event loop."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        self.facts: EngineFacts
        self.stats = EngineStats()
        self.streams: dict[str, RequestStream] = {}
        self.dead = asyncio.Event()
        self.death: EngineDeadError | None = None
        self.process = process
        self._folder = folder
        self._last_heard = time.monotonic()
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        for socket, name in ((self._to_engine, "in"), (self._from_engine, "out")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(_address(folder, name))
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, config: EngineConfig, *, factory: str = ENGINE_FACTORY, heartbeat_s: float = HEARTBEAT_S
    ) -> EngineClient:
        """Start the process and wait until the engine is ready.

        Raises UserError with the engine's own line when the user's model or options cannot work, EngineDeadError
        when the process ended in any other way. Nothing is left running after an error or a cancellation.
        """
        temp = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="qengine-", dir=temp if len(temp) < _SOCKET_PATH_ROOM else "/tmp")
        with _blocked_signals():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _BOOTSTRAP,
                json.dumps(sys.path),
                folder,
                stdin=asyncio.subprocess.PIPE,
                # OpenMP threads that spin between steps would starve the HTTP process
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        client = cls(process, folder)
        start = Start(
            config=config,
            factory=factory,
            inbox=_address(folder, "in"),
            outbox=_address(folder, "out"),
            heartbeat_s=heartbeat_s,
        )
        try:
            await client._handshake(start)
        except BaseException:
            await client.shutdown(kill=True)
            raise
        return client

    async def _handshake(self, start: Start) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(msgspec.json.encode(start) + b"\n")
            await self.process.stdin.drain()
        first = asyncio.ensure_future(self._receive())
        ended = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({first, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():  # its last message may still be on its way
                await asyncio.wait({first}, timeout=LAST_WORDS_S)
            message = first.result() if first.done() else None
        finally:
            first.cancel()
            ended.cancel()
        match message:
            case Ready(facts=facts):
                self.facts = facts
            case StartFailed(error=error, user_error=True):
                raise UserError(error)
            case StartFailed(error=error):
                raise EngineDeadError(f"the engine could not start: {error}")
            case _:
                raise EngineDeadError(f"the engine process ended while starting ({_ending(self.process.returncode)})")
        while not self._to_engine.poll(0, zmq.POLLOUT):  # the engine's other socket is still connecting
            await asyncio.sleep(0.01)
        shutil.rmtree(self._folder)  # both ends are connected: nothing may stay behind, even after a kill -9
        self._last_heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._dispatch()), asyncio.create_task(self._watch_process())]

    async def _receive(self) -> FromEngine:
        return self._decoder.decode(await self._from_engine.recv())

    async def _dispatch(self) -> None:
        while True:
            message = await self._receive()
            self._last_heard = time.monotonic()
            if isinstance(message, Died):
                self.give_up(EngineDeadError(f"the engine stopped: {message.error}"))
            elif isinstance(message, StepOutputs):
                self.stats = message.stats
                for output in message.outputs:
                    stream = self.streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)

    async def _watch_process(self) -> None:
        code = await self.process.wait()
        await asyncio.sleep(0.1)  # its last words come through the socket
        self.give_up(EngineDeadError(f"the engine process ended ({_ending(code)})"))

    def give_up(self, error: EngineDeadError) -> None:
        """End every stream with this error and take no more requests."""
        if self.death is not None or self._stopping:
            return
        self.death = error
        for stream in set(self.streams.values()):
            stream.put(error)
        self.streams.clear()
        self.dead.set()

    def check_alive(self) -> None:
        """Raise EngineDeadError when the engine has ended or is about to be stopped."""
        if self.death is not None or self._stopping:
            raise self.death or ShuttingDownError()

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine. Never blocks: the socket's queue has no limit."""
        try:
            self._to_engine.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as e:  # no peer, or closed
            raise EngineDeadError("the engine process is gone") from e

    def submit(self, requests: Sequence[NewRequest]) -> RequestStream:
        return RequestStream(self, requests)

    def health(self, limit_s: float) -> Health:
        """Well means: the process lives, it was heard within `limit_s`, and with work at hand it makes progress."""
        silent = time.monotonic() - self._last_heard
        busy = self.stats.num_running + self.stats.num_waiting > 0
        still = self.stats.time - self.stats.last_progress if busy else 0.0
        reason = None if self.death is None else str(self.death)
        if reason is None and silent > limit_s:
            reason = f"the engine has not answered for {silent:.1f} s (limit {limit_s:g} s)"
        elif reason is None and still > limit_s:
            reason = f"no progress for {still:.1f} s with requests at hand (limit {limit_s:g} s)"
        return Health(reason, silent, still)

    async def shutdown(self, *, kill: bool = False) -> None:
        """End the process, by Stop or (`kill`) by the end of its standard input, then by force. Safe to call twice."""
        if self._stopping:
            return
        if kill and self.process.stdin is not None:
            self.process.stdin.close()
        elif not kill:
            with contextlib.suppress(EngineDeadError):
                self.send(Stop())
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), CLEAN_UP_S + 1 if kill else STOP_TIMEOUT_S)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may end by itself right now
                self.process.kill()
            await self.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """A process that is started meanwhile inherits the block: no signal ends it before its handlers are there. What
    comes to this process waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _address(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code yet"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
