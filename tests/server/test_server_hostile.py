"""CASES C24: odd and hostile requests get a defined answer, and the server answers the next one."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time

import httpx
import pytest

from server_process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def strict(response: httpx.Response) -> dict:
    """The body, which must be strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(response.text, parse_constant=refuse)


def post(server: ServerProcess, path: str, body: dict | bytes) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers={"content-type": "application/json"}, timeout=60)


def refused(server: ServerProcess, path: str, body: dict | bytes, param: str | None, status: int = 400) -> str:
    response = post(server, path, body)
    assert response.status_code == status, response.text
    error = strict(response)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert "Traceback" not in error["message"] and "\n" not in error["message"]
    return error["message"]


@pytest.fixture(autouse=True)
def answers_the_next_request(server: ServerProcess):
    yield
    response = post(server, COMPLETIONS, {"prompt": "y", "temperature": 0})
    assert strict(response)["choices"][0]["text"] == "abcdefghij"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"999": 5}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [320]}, "stop_token_ids"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "logprobs": 1000}, "logprobs"),
        ({"prompt": "a", "n": 1000}, "n"),
        (b'{"prompt": "a", "n": 1' + b"0" * 400 + b"}", "n"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 4200 + b"}", "seed"),
        ({"prompt": "a", "logit_bias": {"--1": 5}}, "logit_bias"),
        ({"prompt": "a", "min_tokens": 1, "stop_token_ids": list(range(320))}, "min_tokens"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "temprature": 0}, "temprature"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": ["a"] * 4097}, "prompt"),
        ({"prompt": "a", "stop": ["ab"] * 2000}, "stop"),
        ({"prompt": "a", "stop": "a" * 100_000}, "stop"),
        ({"prompt": "a", "priority": 1}, "priority"),
        (b'{"prompt": "\xff\xfe"}', "prompt"),
        (b'{"prompt": "a", "user": "\xff"}', None),
        (b'{"prompt": "a"', None),
        (b'{"prompt": "a", "top_p": Infinity}', None),
        (b"", None),
    ],
)
def test_bad_completions_are_refused(server: ServerProcess, body: dict | bytes, param: str | None) -> None:
    refused(server, COMPLETIONS, body, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HI, "max_completion_tokens": 3, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_chats_are_refused(server: ServerProcess, body: dict, param: str) -> None:
    refused(server, CHAT, body, param)


@pytest.mark.parametrize(
    ("name", "value"), [("chat_template_kwargs", {"a": 1}), ("add_generation_prompt", False), ("chat_template", "x")]
)
def test_a_text_to_tokenize_has_no_template(server: ServerProcess, name: str, value: object) -> None:
    refused(server, "/tokenize", {"prompt": "a", name: value}, name)


def test_one_limit_under_two_names(server: ServerProcess) -> None:
    """Where they differ both are named; where they agree, or one is null, it holds."""
    message = refused(server, CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 3}, "max_tokens")
    assert "max_tokens 5, max_completion_tokens 3" in message
    for limits in ({"max_tokens": 3}, {"max_tokens": None}, {}):
        response = post(server, CHAT, {"messages": HI, "ignore_eos": True, "max_completion_tokens": 3, **limits})
        assert response.status_code == 200 and strict(response)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", COMPLETIONS, 405)])
def test_wrong_paths(server: ServerProcess, method: str, path: str, status: int) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert set(strict(response)["error"]) == {"message", "type", "param", "code"}


def test_unknown_model_is_404(server: ServerProcess) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        assert "toy" in refused(server, path, {"model": "nope", **body}, "model", 404)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [300]},
        {"prompt": "y", "max_tokens": None},
        {"prompt": "y", "top_p": 0},
        {"prompt": "y", "seed": -1},
        {"prompt": "y", "logit_bias": {}},
        {"prompt": "y", "stop": [], "user": "me", "metadata": {"a": "b"}},
    ],
)
def test_odd_but_valid_completions(server: ServerProcess, body: dict) -> None:
    response = post(server, COMPLETIONS, {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    found = strict(response)
    assert found["choices"][0]["text"] == ("né世界😀" if body["prompt"] == [300] else "abcdefghij")
    assert found["usage"]["prompt_tokens"] == 1


def test_logprobs_are_finite_or_null_and_hold_the_chosen_token(server: ServerProcess) -> None:
    body = {"prompt": "y", "top_k": 1, "logprobs": 5, "temperature": 1, "max_tokens": 4}
    found = strict(post(server, COMPLETIONS, body))["choices"][0]["logprobs"]
    assert found["tokens"] == list("abcd")
    assert found["text_offset"] == [0, 1, 2, 3]
    assert all(math.isfinite(v) for v in found["token_logprobs"])
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    chat = {"messages": HI, "temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 3}
    content = strict(post(server, CHAT, chat))["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(b for c in content for b in c["bytes"]) == "né".encode()
    assert all(math.isfinite(c["logprob"]) and len(c["top_logprobs"]) == 3 for c in content)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: ServerProcess, stream: bool) -> None:
    body = {"prompt": "xy", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0, "stream": stream}
    response = post(server, COMPLETIONS, body)
    assert response.status_code == 200, response.text
    if stream:
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
    else:
        choices = strict(response)["choices"]
    assert "".join(c["text"] for c in choices) == "xyab"
    parts = [c["logprobs"] for c in choices if c["logprobs"]]
    joined = {k: [v for part in parts for v in part[k]] for k in ("tokens", "token_logprobs", "text_offset")}
    assert joined["tokens"] == list("xyab")
    assert joined["text_offset"] == [0, 1, 2, 3]
    assert joined["token_logprobs"][0] is None and all(v is not None for v in joined["token_logprobs"][1:])


def test_echo_without_new_tokens_scores_the_prompt(server: ServerProcess) -> None:
    body = {"prompt": [ord("x"), ord("y")], "echo": True, "logprobs": 0, "max_tokens": 0}
    found = strict(post(server, COMPLETIONS, body))
    assert found["choices"][0]["text"] == "xy"
    assert found["choices"][0]["logprobs"]["tokens"] == ["x", "y"]
    assert found["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 0,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_several_prompts_and_choices(server: ServerProcess) -> None:
    for prompt in (["y", "x"], [[ord("y")], [ord("x")]]):
        body = {"prompt": prompt, "n": 3, "seed": 5, "temperature": 0, "max_tokens": 20}
        found = strict(post(server, COMPLETIONS, body))
        assert [c["index"] for c in found["choices"]] == list(range(6))
        assert [c["text"] for c in found["choices"]] == ["abcdefghij"] * 3 + ["né世界😀"] * 3
        assert found["usage"]["prompt_tokens"] == 2
        assert found["usage"]["completion_tokens"] == 3 * 11 + 3 * 14


def test_content_as_parts(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    found = strict(post(server, CHAT, {"messages": [{"role": "user", "content": parts}], "temperature": 0}))
    plain = strict(post(server, CHAT, {"messages": HI, "temperature": 0}))
    assert found["choices"][0]["message"]["content"] == "né世界😀"
    assert found["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"] in (0, 1), "joined, perhaps with a newline"


@pytest.mark.parametrize("body", [{"prompt": "a" * 20_000_000}, {"prompt": [12345] * 3_400_000}], ids=["text", "ids"])
def test_health_answers_while_a_huge_prompt_comes(server: ServerProcess, body: dict) -> None:
    content = json.dumps(body, separators=(",", ":")).encode()
    answers: list[tuple[int, str]] = []

    def send() -> None:  # http.client: one sendall, which leaves the interpreter to the probe
        connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        connection.request("POST", COMPLETIONS, content, {"content-type": "application/json"})
        response = connection.getresponse()
        answers.append((response.status, response.read().decode()))
        connection.close()

    sender = threading.Thread(target=send)
    waits = []
    with httpx.Client() as probe:
        probe.get(server.url + "/health")
        sender.start()
        while sender.is_alive():
            start = time.perf_counter()
            assert probe.get(server.url + "/health").status_code == 200
            waits.append(time.perf_counter() - start)
            time.sleep(0.02)
    status, text = answers[0]
    assert status == 400
    error = json.loads(text)["error"]
    assert error["param"] == "prompt" and "2048" in error["message"]
    print(f"longest wait for /health: {max(waits) * 1000:.0f} ms")
    assert len(waits) > 1 and max(waits) < 2, "generous: the machine may be busy"


def test_body_over_the_limit_is_413(server: ServerProcess) -> None:
    response = post(server, COMPLETIONS, b'{"prompt": "' + b"a" * 33 * 2**20 + b'"}')
    assert response.status_code == 413
    assert strict(response)["error"]["code"] == "body_too_large"


def test_a_body_announced_too_large_is_not_waited_for(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99999999999\r\n\r\n{{}}"
        sock.sendall(head.encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
