"""The load generator: what it reads of a stream, when it asks, and how it tells of failures."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from qengine.bench import serve
from qengine.bench.http_client import Client, HttpError
from qengine.bench.options import ServeOptions
from qengine.errors import ConfigError, QEngineError

Answer = Callable[[dict[str, Any]], AsyncIterator[bytes]]


class Server:
    """Speaks just enough HTTP: each request's body goes to `answer`, whose pieces are the whole response."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.connections = self.running = self.most = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                length = 0
                while (head := await reader.readline()).strip():
                    if head.lower().startswith(b"content-length:"):
                        length = int(head.split(b":")[1])
                body = json.loads(await reader.readexactly(length)) if length else {}
                body["line"] = line.decode()
                self.asked.append(body)
                self.running += 1
                self.most = max(self.most, self.running)
                async for piece in self.answer(body):
                    writer.write(piece)
                    await writer.drain()
                self.running -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        writer.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: dict[str, Any] | str) -> bytes:
    return chunk(b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n")


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"data": [{"id": "mine"}]}'


async def stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """A completion of max_tokens tokens, 5 ms apart, after 20 ms."""
    if body["line"].startswith("GET"):
        yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(MODELS) + MODELS
        return
    yield HEAD
    chat = "messages" in body
    if chat:
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    await asyncio.sleep(0.02)
    for i in range(body["max_tokens"]):
        text = f"t{i}"
        yield event({"choices": [{"delta": {"content": text}} if chat else {"text": text, "finish_reason": None}]})
        await asyncio.sleep(0.005)
    last = {"delta": {}} if chat else {"text": ""}
    yield event({"choices": [last | {"finish_reason": "length"}]})
    yield event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}})
    yield event("[DONE]") + b"0\r\n\r\n"


def measured(answer: Answer, **options: Any) -> tuple[dict[str, Any], Server]:
    async def run() -> tuple[dict[str, Any], Server]:
        server = Server(answer)
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        settings = {"num_prompts": 6, "random_input_len": 5, "random_output_len": 4, **options}
        try:
            found = await asyncio.to_thread(serve.measure, ServeOptions(port=port, **settings))
        finally:
            listening.close()
        return found, server

    return asyncio.run(run())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_stream_is_timed_where_tokens_are(backend: str) -> None:
    found, server = measured(stream, backend=backend, save_detailed=True, num_warmups=0)
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "mine")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (54, 24)
    assert all(len(r["itl"]) == 3 for r in found["requests"]), "neither role nor usage nor the end is a token"
    assert found["median_ttft_ms"] >= 20 and found["median_itl_ms"] >= 5
    assert found["median_e2el_ms"] >= found["median_ttft_ms"] + 15
    posts = [a for a in server.asked if a["line"].startswith("POST")]
    path = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    assert {a["line"].split()[1] for a in posts} == {path}
    assert all(a["stream"] and a["stream_options"]["include_usage"] and a["model"] == "mine" for a in posts)
    text = posts[0]["messages"][0]["content"] if backend == "openai-chat" else posts[0]["prompt"]
    assert len(text.split()) == 5


def test_concurrency_is_bounded_and_connections_are_kept() -> None:
    _, server = measured(stream, max_concurrency=2, num_warmups=1, ignore_eos=True)
    assert server.most == 2 and server.connections == 2
    assert all(a["ignore_eos"] for a in server.asked if a["line"].startswith("POST"))
    _, server = measured(stream, num_warmups=0)
    assert server.most == 6, "the control: without a bound all are there at once"


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    def gaps(**options: Any) -> list[float]:
        at = serve.arrivals(ServeOptions(num_prompts=4000, **options))
        return [b - a for a, b in itertools.pairwise(at)]

    mean = [sum(g) / len(g) for g in (gaps(request_rate=4.0), gaps(request_rate=4.0, burstiness=9.0))]
    assert mean == pytest.approx([0.25, 0.25], rel=0.1)
    wide, narrow = gaps(request_rate=4.0), gaps(request_rate=4.0, burstiness=9.0)
    assert max(wide) > 1.5 and max(narrow) < 1.0
    assert set(gaps()) == {0.0}


async def failing(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Every other request is refused, and one breaks off."""
    if body["line"].startswith("GET") or body["max_tokens"] % 3 == 0:
        async for piece in stream(body):
            yield piece
    elif body["max_tokens"] % 3 == 1:
        text = b'{"error": "too long"}'
        yield b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    else:
        yield HEAD + event({"error": {"message": "engine died"}}) + b"0\r\n\r\n"


def test_failures_are_counted_and_told() -> None:
    found, _ = measured(failing, num_warmups=0, num_prompts=40, random_output_len=9, random_range_ratio=0.6)
    assert found["completed"] > 5 and found["failed"] > 5 and found["completed"] + found["failed"] == 40
    assert any("HTTP 400" in e and "too long" in e for e in found["errors"])
    assert any("engine died" in e for e in found["errors"])
    with pytest.raises(QEngineError, match=r"first request.*HTTP 400"):
        measured(failing, num_warmups=1, random_output_len=4)
    with pytest.raises(QEngineError, match=r"every request failed.*engine died"):
        measured(failing, num_warmups=0, random_output_len=5)


def test_an_answer_that_never_ends_is_given_up() -> None:
    async def silent(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield HEAD
        await asyncio.sleep(30)

    with pytest.raises(QEngineError, match=r"no end after 0\.1 s"):
        measured(silent, num_warmups=0, timeout=0.1, model="mine")


@pytest.mark.parametrize(
    ("response", "lines"),
    [
        (HEAD + chunk(b"da") + chunk(b"ta: 1\r\nx") + b"0\r\n\r\n", [b"data: 1", b"x"]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\na\nb\nc", [b"a", b"b", b"c"]),
        (b"HTTP/1.0 200 OK\r\n\r\na\n\nb\n", [b"a", b"", b"b"]),
        (b"SSH-2.0\r\n\r\n", HttpError),
    ],
    ids=["chunks across lines", "length", "until the end", "not HTTP"],
)
def test_bodies_of_every_kind_are_read(response: bytes, lines: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(response)
        await writer.drain()
        writer.close()

    async def run() -> list[bytes]:
        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {})
        try:
            return [line async for line in client.post("/", b"{}")]
        finally:
            await client.close()
            listening.close()

    if lines is HttpError:
        with pytest.raises(HttpError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == lines


def test_nobody_there_is_one_error() -> None:
    with pytest.raises(ConfigError, match="no model can be asked for"):
        serve.measure(ServeOptions(port=9))
    with pytest.raises(ConfigError, match="--base-url is no URL"):
        serve.measure(ServeOptions(base_url="localhost"))
