"""API keys: an ASGI layer in front of the app."""

from __future__ import annotations

import os
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from qengine.server.errors import ApiError

KEY_ENV = "QENGINE_API_KEY"
OPEN_PATHS = frozenset({"/health", "/version"})


def api_keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """Keys of the command line, else the one of the environment."""
    from_env = os.environ.get(KEY_ENV)
    return given or ((from_env,) if from_env else ())


class ApiKeyGuard:
    """Answers 401 to requests without a valid key. Compares in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed in the header `Authorization: Bearer KEY`",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # no early exit: the time must not tell which key was near
        matches = [secrets.compare_digest(given, known) for known in self.keys]
        return scheme.lower() == "bearer" and any(matches)
