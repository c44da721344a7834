"""What the official client and its users rely on: shapes, usage, streams, several at once, leaving, metrics."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from server_process import ServerProcess, until

HI = [{"role": "user", "content": "hi"}]


def test_models(client: openai.OpenAI) -> None:
    found = client.models.list().data
    assert [m.id for m in found] == ["toy", "alias"]
    assert found[0].object == "model" and found[0].max_model_len == 2048
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


def test_the_answer_carries_the_name_that_was_asked_for(client: openai.OpenAI) -> None:
    assert client.completions.create(model="alias", prompt="y").model == "alias"


def test_completion_shape(client: openai.OpenAI) -> None:
    found = client.completions.create(model="toy", prompt="xy", temperature=0, max_tokens=50)
    assert found.object == "text_completion" and found.id.startswith("cmpl-")
    assert abs(found.created - time.time()) < 60
    assert found.usage.prompt_tokens == 2
    assert found.usage.completion_tokens == 11, "ten letters and the end of sequence"
    assert found.usage.total_tokens == 13
    assert found.choices[0].logprobs is None


def test_default_max_tokens(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="toy", prompt="L", temperature=0)
    assert (plain.usage.completion_tokens, plain.choices[0].finish_reason) == (16, "length")
    chat = client.chat.completions.create(
        model="toy", messages=HI, temperature=0, extra_body={"ignore_eos": True}, max_completion_tokens=40
    )
    assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (40, "length")


def test_a_default_max_tokens_that_does_not_fit_takes_what_does(client: openai.OpenAI) -> None:
    long = [ord("x")] * 2043 + [ord("L")]
    found = client.completions.create(model="toy", prompt=long, temperature=0)
    assert (found.usage.total_tokens, found.choices[0].finish_reason) == (2048, "length")
    with pytest.raises(openai.BadRequestError, match="2044 \\+ 16 tokens"):
        client.completions.create(model="toy", prompt=long, max_tokens=16)


def test_a_prompt_of_one_token_has_no_logprobs_to_echo(client: openai.OpenAI) -> None:
    found = client.completions.create(model="toy", prompt="y", temperature=0, max_tokens=1, logprobs=1, echo=True)
    assert found.choices[0].text == "ya"
    assert found.choices[0].logprobs.tokens == ["y", "a"]
    assert found.choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("asked", [0, 2])
def test_prompt_logprobs_in_both_endpoints(client: openai.OpenAI, asked: int) -> None:
    """vLLM's field and shape; they are those that echo gives, and the most that either asks for is computed."""
    fields = {"extra_body": {"prompt_logprobs": asked}, "model": "toy", "max_tokens": 1, "temperature": 0}
    found = client.completions.create(prompt="yes", echo=True, logprobs=1, n=2, **fields)  # type: ignore[call-overload]
    for choice in found.choices:
        first, *others = choice.prompt_logprobs
        assert first is None and len(others) == 2
        echoed = choice.logprobs.token_logprobs[1:3]
        for position, character, logprob in zip(others, "es", echoed, strict=True):
            own = position[str(ord(character))]
            assert own["logprob"] == logprob and own["decoded_token"] == character
            ranks = {p["rank"] for p in position.values()}
            assert ranks == {own["rank"], *range(1, asked + 1)}
    chat = client.chat.completions.create(messages=HI, **fields)  # type: ignore[call-overload]
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    plain = client.completions.create(model="toy", prompt="yes", max_tokens=1)
    assert "prompt_logprobs" not in plain.choices[0].model_dump()
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs needs a whole answer"):
        client.completions.create(prompt="yes", stream=True, **fields)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is out of range"):
        client.completions.create(model="toy", prompt="yes", extra_body={"prompt_logprobs": 21})


def test_what_one_choice_shares_with_the_next_was_not_cached(client: openai.OpenAI) -> None:
    found = client.completions.create(model="toy", prompt="not asked before " * 20, n=3, max_tokens=2, temperature=0)
    assert found.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_comes_once_in_a_last_chunk_without_choices(
    client: openai.OpenAI, kind: str, include_usage: bool
) -> None:
    fields = {"model": "toy", "temperature": 0, "stream": True, "max_tokens": 50}
    if include_usage:
        fields["stream_options"] = {"include_usage": True}
    if kind == "chat":
        chunks = list(client.chat.completions.create(messages=HI, **fields))
    else:
        chunks = list(client.completions.create(prompt="x", **fields))
    assert len({c.id for c in chunks}) == 1
    ends = [c for c in chunks if any(choice.finish_reason for choice in c.choices)]
    assert len(ends) == 1
    if not include_usage:
        assert all(c.usage is None and c.choices for c in chunks)
        return
    *others, last = chunks
    assert all(c.usage is None and c.choices for c in others)
    assert last.choices == [] and last.usage.completion_tokens == 14
    assert last.usage.total_tokens == last.usage.prompt_tokens + 14


def test_usage_field_is_absent_unless_asked_for(server: ServerProcess) -> None:
    def chunks(**fields: object) -> list[dict]:
        body = {"prompt": "y", "stream": True, **fields}
        text = httpx.post(server.url + "/v1/completions", json=body).text
        lines = [line for line in text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    assert all("usage" not in c for c in chunks())
    found = chunks(stream_options={"include_usage": True})
    assert all(c["usage"] is None for c in found[:-1]) and found[-1]["usage"]


def test_n_choices_stream_under_their_own_index(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in client.chat.completions.create(model="toy", messages=HI, n=3, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append(choice.index)
    assert set(texts.values()) == {"né世界😀"}
    assert sorted(ends) == [0, 1, 2]


def test_sixteen_streams_at_once(server: ServerProcess) -> None:
    def one(i: int) -> str:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            prompt = "xyzL"[i % 4] * (1 + i)
            stream = client.completions.create(model="toy", prompt=prompt, temperature=0, max_tokens=20, stream=True)
            return "".join(c.choices[0].text for c in stream)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(16)))
    assert found == ["né世界😀", "abcdefghij", "A", "ML" * 10] * 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess, path: str, stream: bool) -> None:
    until(lambda: server.metric("kv_cache_blocks_used") == 0)
    body = {"stream": stream, "ignore_eos": True, "max_tokens": 2000, "n": 2, "temperature": 0}
    body |= {"prompt": "L"} if path.endswith("v1/completions") else {"messages": HI}
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    before = server.metric("request_success_total", finished_reason="abort")
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(head + content)
        until(lambda: server.metric("num_requests_running") == 2)
        assert server.metric("kv_cache_blocks_used") > 0
        left = time.monotonic()
    until(lambda: server.metric("num_requests_running") == 0 and server.metric("kv_cache_blocks_used") == 0)
    print(f"blocks free {time.monotonic() - left:.2f} s after the client left")
    assert server.metric("request_success_total", finished_reason="abort") == before + 2


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    def post(path: str, **body: object) -> dict:
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    found = post("/tokenize", model="toy", prompt="né", return_token_strs=True)
    assert found == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": [110, 195, 169],
        "token_strs": ["n", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert post("/detokenize", tokens=found["tokens"]) == {"prompt": "né"}
    chat = post("/tokenize", messages=HI)
    assert post("/detokenize", tokens=chat["tokens"]) == {"prompt": "<user>hi\n<assistant>"}
    assert post("/tokenize", messages=HI, add_generation_prompt=False)["count"] < chat["count"]
    for path, body in (
        ("/tokenize", {"prompt": "a", "messages": HI}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [320]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 400 and response.json()["error"]["message"]


def test_version_and_health(server: ServerProcess) -> None:
    from qengine import __version__

    assert httpx.get(server.url + "/version").json() == {"version": __version__}
    found = httpx.get(server.url + "/health")
    assert found.status_code == 200
    assert found.json()["status"] == "ok" and found.json()["reason"] is None
    assert found.json()["heartbeat_age_s"] < 30


NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "expert_cache_queries_total",
    "expert_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_success_total",
    "kv_slots_wasted",
    "kv_slots_wasted_perc",
)


def test_metrics_have_their_names_and_count(server: ServerProcess, client: openai.OpenAI) -> None:
    until(lambda: server.metric("num_requests_running") == 0)
    before = {name: server.metric(name, model_name="toy") for name in NAMES}
    stops = server.metric("request_success_total", finished_reason="stop")
    client.completions.create(model="toy", prompt="my", temperature=0, max_tokens=50)
    until(lambda: server.metric("num_requests_running") == 0)
    gained = {name: server.metric(name, model_name="toy") - before[name] for name in NAMES}
    assert gained["prompt_tokens_total"] == 2
    assert gained["generation_tokens_total"] == 11
    assert gained["time_to_first_token_seconds_count"] == 1
    assert gained["inter_token_latency_seconds_count"] == 10
    assert gained["e2e_request_latency_seconds_count"] == 1
    assert server.metric("request_success_total", finished_reason="stop") == stops + 1
    head = httpx.get(server.url + "/metrics")
    assert head.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE qengine:time_to_first_token_seconds histogram" in head.text
    assert 'qengine:time_to_first_token_seconds_bucket{le="0.001",model_name="toy"}' in head.text
    assert 'le="2560.0"' in head.text
