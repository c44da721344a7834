"""The little of HTTP/1.1 that a load generator needs: POST, an answer that is read line by line, connections kept.

Written on asyncio's streams: what stands between a byte's arrival and the clock is part of what is measured.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

from qengine.errors import ConfigError

LINE_LIMIT = 1 << 22
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(Exception):
    """A status that is not 200, or an answer that is no HTTP."""


class Client:
    """Requests to one server. `base`: http:// or https://, with a path in front of every other where it has one."""

    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        url = urlsplit(base)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError("--base-url is no URL", have=base, need="such as http://127.0.0.1:8000")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.hostname, url.port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/")
        self._headers = {"Host": url.netloc, "Accept": "*/*", **headers}
        self._idle: list[Connection] = []

    async def get(self, path: str) -> bytes:
        return b"".join([line async for line in self._request("GET", path, b"")])

    def post(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The lines of the answer's body as they come. Raises HttpError, OSError."""
        return self._request("POST", path, body)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        reader, writer = await self._connection()
        whole = False
        try:
            headers = dict(self._headers)
            if body:
                headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
            head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
            writer.write(f"{method} {self._path}{path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            status, answer = await _head(reader)
            lines = _lines(_pieces(reader, answer))
            if status != 200:
                text = b"".join([line async for line in lines]).decode("utf-8", "replace")
                raise HttpError(f"HTTP {status}: {' '.join(text.split())[:300]}")
            async for line in lines:
                yield line
            whole = answer.get("connection", "").lower() != "close" and (
                "content-length" in answer or "chunked" in answer.get("transfer-encoding", "").lower()
            )
        finally:
            if whole:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LINE_LIMIT)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case)."""
    first = (await reader.readline()).split()
    if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
        raise HttpError("the server does not speak HTTP/1.1")
    headers = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first[1]), headers


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes, by whichever of the three ways the headers announce."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
        while (await reader.readline()).strip():
            pass
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(1 << 16):
            yield data


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held = b""
    async for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if held:
        yield held
