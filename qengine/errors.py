"""Error types shared by every room.

An error that a user can cause carries what was found, what is needed and what would work, so that the command line
(exit code 2) and the server (HTTP 400) can show one clear line and no traceback.
"""

from __future__ import annotations

from collections.abc import Mapping


class QEngineError(Exception):
    """Base of every error that qengine raises on purpose."""


class UserError(QEngineError):
    """Something the user gave cannot work: exit code 2 on the command line, HTTP 400 in the server.

    `have` and `need` are appended to the message when given; `hint` says what would work.
    """

    def __init__(
        self, message: str, *, have: object = None, need: object = None, hint: str | None = None
    ) -> None:
        parts = [message]
        if have is not None:
            parts.append(f"have: {_shown(have)}")
        if need is not None:
            parts.append(f"need: {need}")
        if hint:
            parts.append(f"what would work: {hint}")
        super().__init__("; ".join(parts))
        self.message = message
        self.have = have
        self.need = need
        self.hint = hint


def _shown(value: object) -> str:
    """Python refuses to print integers of thousands of digits, and nobody wants to read them."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return str(value)
    except ValueError:
        return f"a {type(value).__name__} with an integer of thousands of digits"


class ConfigError(UserError):
    """A flag, keyword or combination of them is wrong."""


class CheckpointError(UserError):
    """A model folder is incomplete, damaged, unsafe or in a format that is refused by name."""


class CapabilityError(UserError):
    """This device cannot run what was asked for."""


class CapacityError(UserError):
    """Something does not fit into memory or into the KV cache; the message holds both numbers.

    `changes` are other values for fields of the engine's config with which it fits; empty where no setting helps.
    """

    def __init__(
        self,
        message: str,
        *,
        have: object = None,
        need: object = None,
        hint: str | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, have=have, need=need, hint=hint)
        self.changes = dict(changes or {})


class PluginError(UserError):
    """A plugin is missing, broken, clashes with another or was written for another contract version."""


class RequestError(UserError):
    """One request is invalid; the engine goes on. `param` names the field in the OpenAI error body."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        have: object = None,
        need: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, have=have, need=need, hint=hint)
        self.param = param


class EngineDeadError(QEngineError):
    """The engine loop has ended or no longer answers."""


class ShuttingDownError(EngineDeadError):
    """The server was told to stop; nothing is wrong with the engine."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
