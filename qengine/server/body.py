"""From a request's bytes to a typed body, strictly: size, UTF-8, JSON, field names and types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from qengine.server.errors import ApiError

B = TypeVar("B", bound=msgspec.Struct)

DISCARD_BYTES = 256 * 2**20
"""How much of a body that is too large is read and dropped, so that the client reads the answer, not a reset."""

OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "allowed_token_ids": "logit_bias",
}
"""What other endpoints and other servers call a field."""
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or ApiError 413 when it is larger than `limit` bytes."""
    declared = request.headers.get("content-length", "0")
    size = 0
    parts: list[bytes] = []
    too_large = declared.isdecimal() and int(declared) > limit
    if too_large and int(declared) > limit + DISCARD_BYTES:
        raise _too_large(limit)  # what is announced won't all be read, so nothing is waited for
    async for chunk in request.stream():
        size += len(chunk)
        too_large = too_large or size > limit
        if too_large:
            parts.clear()
            if size > limit + DISCARD_BYTES:
                break
        else:
            parts.append(chunk)
    if too_large:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the request body is too large; have: more than {limit} bytes; need: at most {limit}"
    return ApiError(413, message, code="body_too_large")


def decode_body(data: bytes, kind: type[B]) -> B:
    """Typed body; ApiError 400 names the field and, where a name is unknown, the nearest one that exists."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        raise _invalid(str(e), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"the request body is not valid JSON in UTF-8: {e}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from None


def _invalid(text: str, kind: type[msgspec.Struct]) -> ApiError:
    path = _PATH.search(text)
    where = path.group(1) if path else ""
    text = _PATH.sub("", text)
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    if unknown:
        name = unknown.group(1)
        near = _nearest(name, kind.__struct_fields__) if not where else []
        hint = f"; what would work: {near[0]}" if near else "; what would work: leave it out"
        param = f"{where}.{name}" if where else name
        return ApiError(400, f"unknown field {param}{hint}", param=param, code="unknown_field")
    if missing:
        param = f"{where}.{missing.group(1)}" if where else missing.group(1)
        return ApiError(400, f"missing field {param}", param=param, code="missing_field")
    param = where or None
    return ApiError(400, f"{param or 'the request body'}: {text}", param=param, code="invalid_type")


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The field that is meant, where that is clear: others that look alike may mean the contrary."""
    if (other := OTHER_NAMES.get(name)) in known:
        return [str(other)]
    return difflib.get_close_matches(name, known, 1, cutoff=0.85)


async def typed_body(request: Request, kind: type[B], limit: int) -> B:
    try:
        return decode_body(await read_body(request, limit), kind)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None
