"""The engine's own process: drain the socket, step, send what came out; say so when idle, and when it dies.

Started by `engine_client`, which owns its life: SIGTERM and SIGINT, which a terminal or a service manager sends to
both processes, are left to the parent (it drains, then sends Stop), and the end of standard input means that the
parent is gone.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

import msgspec
import zmq

from qengine.config import EngineConfig
from qengine.errors import UserError
from qengine.messages import Abort, EngineStats, NewRequest, StepOutputs
from qengine.plugin.faults import plugin_fault
from qengine.runtime.facts import EngineFacts
from qengine.server.parent_watch import ParentWatch
from qengine.server.protocol import Died, FromEngine, Ready, Start, StartFailed, Stop, ToEngine

LAST_WORDS_MS = 2000
"""How long an exiting process waits until its last message has left the socket."""


class EngineLike(Protocol):
    """What the loop needs of `qengine.runtime.engine.Engine`."""

    facts: EngineFacts

    @property
    def has_work(self) -> bool: ...
    def add(self, new: NewRequest) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> EngineStats: ...
    def shutdown(self) -> None: ...


def build_engine(config: EngineConfig) -> EngineLike:
    """The factory of real engines: find or make the model folder, then load it."""
    from qengine.prepare import prepare_model
    from qengine.runtime.engine import Engine
    from qengine.runtime.model_texts import ModelTexts

    config = prepare_model(config, lambda line: print(line, file=sys.stderr, flush=True))
    # The HTTP process reads these, but only once the engine is ready: what is wrong with them is said now.
    ModelTexts.read(config.model or "", config.tokenizer, trust_remote_code=config.trust_remote_code)
    return Engine.from_config(config)


class EngineLoop:
    """Moves messages between the sockets and one engine."""

    def __init__(self, engine: EngineLike, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], heartbeat_s: float):
        self.engine = engine
        self.inbox = inbox
        self.outbox = outbox
        self.heartbeat_s = heartbeat_s
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._next_beat = 0.0
        self._rested = False
        """Idle since the last heartbeat: the step that finds nothing to do, and checks the cache's books, is done."""

    def run(self) -> None:
        """Until Stop comes. Whatever `engine.step` raises is the caller's to report."""
        while self._take_messages():
            busy = self.engine.has_work
            if not busy and time.monotonic() < self._next_beat:
                continue
            idle_again = self._rested and not busy
            send(self.outbox, StepOutputs(outputs=[], stats=self.engine.stats()) if idle_again else self.engine.step())
            self._rested = not busy
            self._next_beat = time.monotonic() + self.heartbeat_s

    def _take_messages(self) -> bool:
        """Handle everything that has come; with nothing to compute, wait for more until the next heartbeat."""
        wait_s = 0.0 if self.engine.has_work else max(0.0, self._next_beat - time.monotonic())
        if not self.inbox.poll(int(wait_s * 1000) + (wait_s > 0)):
            return True
        while True:
            try:
                message = self._decoder.decode(self.inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(message, Stop):
                return False
            if isinstance(message, Abort):
                self.engine.abort(message.request_ids)
                self._next_beat, self._rested = 0.0, False  # the gauges show the freed blocks at once
            else:
                self.engine.add(message)


def send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(msgspec.msgpack.encode(message))


def _resolve(factory: str) -> Callable[[EngineConfig], EngineLike]:
    module, _, name = factory.partition(":")
    found: Callable[[EngineConfig], EngineLike] = getattr(import_module(module), name)
    return found


def run(start: Start, parent: ParentWatch) -> int:
    """Build the engine, serve until Stop. Returns the exit code: 0 after Stop, 2 for a user's error, 1 otherwise.
    Raises KeyboardInterrupt when the parent gives up while the engine is built."""
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, start.inbox), (outbox, start.outbox)):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        socket.connect(address)
    engine = None
    try:
        try:
            engine = _resolve(start.factory)(start.config)
        finally:
            parent.building = False
        gc.collect()
        gc.freeze()  # models and libraries stay: a collection that looks at them would hold up a step by tens of ms
        send(outbox, Ready(facts=engine.facts))
        EngineLoop(engine, inbox, outbox, start.heartbeat_s).run()
        engine.shutdown()
        return 0
    except Exception as e:
        started = engine is not None
        fault = plugin_fault(e)
        user_error = not started and (isinstance(e, UserError) or fault is not None)
        text = str(fault or e) if user_error or fault is not None else f"{type(e).__name__}: {e}"
        if not user_error:
            traceback.print_exc()  # first: after its last message the parent may end this process at any time
        send(outbox, Died(error=text) if started else StartFailed(error=text, user_error=user_error))
        return 2 if user_error else 1
    finally:
        context.destroy()


def main(folder: str) -> None:
    """`folder`: where the parent's sockets lie."""
    parent = ParentWatch(folder)
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            shutil.rmtree(folder, ignore_errors=True)
            sys.exit(1)
        line += chunk
    start = msgspec.json.decode(bytes(line), type=Start)
    try:
        parent.start()
        code = run(start, parent)
    except KeyboardInterrupt:
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    parent.leave(code)
