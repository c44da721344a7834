"""Errors on their way to the client: one mapping from exceptions to the OpenAI error body."""

from __future__ import annotations

import logging

import msgspec
from starlette.responses import Response

from qengine.errors import EngineDeadError, RequestError, ShuttingDownError, UserError
from qengine.server.responses import json_response

log = logging.getLogger("qengine.server")


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An error with its HTTP status and OpenAI body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = ErrorBody(ErrorDetail(message=message, type=type, param=param, code=code))

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


class RequestFailedError(Exception):
    """The engine ended one request with an error of its own, such as logits that were not finite."""


def api_error(error: BaseException) -> ApiError:
    """What the client is told. Errors that nobody foresaw are logged with their traceback and get a plain 500."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case UserError():
            return ApiError(400, str(error))
        case ShuttingDownError():
            return ApiError(503, str(error), type="server_error", code="shutting_down")
        case EngineDeadError():
            return ApiError(503, str(error), type="server_error", code="engine_dead")
        case RequestFailedError():
            return ApiError(500, str(error), type="server_error", code="request_failed")
        case _:
            log.error("unforeseen error in a request", exc_info=error)
            return ApiError(500, f"internal error: {type(error).__name__}", type="server_error")
