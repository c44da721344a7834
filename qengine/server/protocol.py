"""What crosses the socket between the HTTP process and the engine process, beside `qengine.messages`."""

from __future__ import annotations

import msgspec

from qengine.config import EngineConfig
from qengine.messages import Abort, NewRequest, StepOutputs
from qengine.runtime.facts import EngineFacts


class Start(msgspec.Struct, kw_only=True):
    """First line of the engine process's standard input, as JSON.

    `factory` is "module:function", a function that takes the EngineConfig and returns an engine. `inbox` and `outbox`
    are zmq addresses seen from the engine. `heartbeat_s`: seconds between signs of life when idle.
    """

    config: EngineConfig
    factory: str
    inbox: str
    outbox: str
    heartbeat_s: float


class Stop(msgspec.Struct, tag=True):
    """Leave the loop and exit 0."""


class Ready(msgspec.Struct, tag=True):
    facts: EngineFacts


class StartFailed(msgspec.Struct, tag=True):
    """The engine could not be built. `user_error`: the user can mend it, so there is one line and no traceback."""

    error: str
    user_error: bool


class Died(msgspec.Struct, tag=True):
    """A step raised; the process exits non-zero after this message."""

    error: str


ToEngine = NewRequest | Abort | Stop
FromEngine = Ready | StartFailed | StepOutputs | Died
