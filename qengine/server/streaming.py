"""Server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from qengine.server.errors import api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _left(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client left first; then `work` is cancelled, as it is with the caller."""
    job, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({job, left}, return_when=asyncio.FIRST_COMPLETED)
        return job.result() if job.done() else None
    finally:
        job.cancel()
        left.cancel()
        await asyncio.gather(job, left, return_exceptions=True)


def client_left() -> Response:
    """What is returned when nobody is there to read it."""
    return Response(status_code=499)


class EventStream(Response):
    """Sends each value of `values` as an event, then [DONE]. An error on the way is an event in OpenAI form.

    `values` is closed when the client leaves, also while no value is at hand.
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncGenerator[Any, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.values = values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.values) as values:
            try:
                async for value in values:
                    await send({"type": "http.response.body", "body": event(value), "more_body": True})
            except Exception as e:
                body = event(api_error(e).body)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
