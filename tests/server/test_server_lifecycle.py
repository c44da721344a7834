"""Starting, failing, draining, dying: what an operator sees of the server's process."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import httpx
import openai
import pytest

import fake_engine
from server_process import FAKE, ServerProcess, running, until
from toy_models import chain_map, make_bytetok

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_engine.write_script(tmp_path, chain_map(b"abc"), step_s=0.01)
    (tmp_path / "config.json").write_text('{"eos_token_id": 257}')
    return make_bytetok(tmp_path)


def stream_in_background(made: ServerProcess, **body: object) -> tuple[threading.Thread, list[str]]:
    """Start a long streamed answer; returns its thread and the lines that came, once the first has come."""
    lines: list[str] = []

    def read() -> None:
        fields = {"prompt": "x", "stream": True, "ignore_eos": True, "temperature": 0, **body}
        with httpx.stream("POST", made.url + "/v1/completions", json=fields, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)  # one by one: the test looks on while they come

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    until(lambda: lines)
    return thread, lines


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(folder: Path, signum: int) -> None:
    with running(folder) as made:
        thread, lines = stream_in_background(made, max_tokens=100)
        made.process.send_signal(signum)
        thread.join(20)
        assert "data: [DONE]" in lines
        assert any('"finish_reason":"length"' in line for line in lines)
        assert made.wait(20) == 0
        assert "Traceback" not in made.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(made.url + "/health")


def test_requests_over_the_limit_end_with_an_error(folder: Path) -> None:
    with running(folder, shutdown_timeout=0.3) as made:
        thread, lines = stream_in_background(made, max_tokens=2000)
        made.process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert lines[-2:] == ["data: [DONE]", ""]
        assert any("shutting down" in line and '"code":"shutting_down"' in line for line in lines)
        assert made.wait(20) == 0
        assert "qengine: finishing 1 request(s), 0.3 s at most" in made.text
        assert "Traceback" not in made.text


def test_killed_engine_means_503_with_the_reason_then_exit_1(folder: Path) -> None:
    with running(folder) as made:
        thread, lines = stream_in_background(made, max_tokens=2000)
        os.kill(made.engine_pid(), signal.SIGKILL)
        until(lambda: httpx.get(made.url + "/health").status_code == 503)
        assert "signal 9" in httpx.get(made.url + "/health").json()["reason"]
        refused = httpx.post(made.url + "/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_dead"
        thread.join(10)
        assert any('"code":"engine_dead"' in line for line in lines) and lines[-2] == "data: [DONE]"
        assert made.wait(20) == 1
        assert "the engine process ended (signal 9)" in made.text


def test_stuck_engine_means_503_until_it_moves_again(folder: Path) -> None:
    with running(folder, health_timeout=1) as made:
        pid = made.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: httpx.get(made.url + "/health").status_code == 503)
            assert "has not answered" in httpx.get(made.url + "/health").json()["reason"]
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: httpx.get(made.url + "/health").status_code == 200)


def test_failing_step_ends_the_process_with_its_text(folder: Path) -> None:
    with running(folder) as made:
        answer = httpx.post(made.url + "/v1/completions", json={"prompt": fake_engine.CRASH.decode()})
        assert answer.status_code == 503
        assert "scripted crash" in answer.json()["error"]["message"]
        assert made.wait(20) == 1


def test_an_error_of_one_request_is_its_own(folder: Path) -> None:
    bad = fake_engine.NONFINITE.decode()
    with running(folder, served_model_name=["toy"]) as made:
        thread, lines = stream_in_background(made, max_tokens=100)
        whole = httpx.post(made.url + "/v1/completions", json={"prompt": bad})
        assert whole.status_code == 500
        assert whole.json()["error"] == {
            "message": "logits are not finite",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
        with openai.OpenAI(base_url=made.url + "/v1", api_key="none", max_retries=0) as client:
            got = []
            with pytest.raises(openai.APIError, match="not finite"):
                for chunk in client.completions.create(model="toy", prompt=bad, stream=True):
                    got.append(chunk.choices[0].text)
            assert len(got) == 2, "what came before the error stays"
        thread.join(20)
        assert "data: [DONE]" in lines and not any("error" in line for line in lines)
        assert made.metric("request_success_total", finished_reason="error") == 2
        assert made.stop() == 0


def test_engine_that_refuses_to_start_is_one_line_and_exit_2(folder: Path) -> None:
    fake_engine.write_script(folder, chain_map(b"abc"), refuse="no such model; need: another")
    made = ServerProcess(folder, FAKE, {}, {})
    assert made.wait() == 2, made.text
    assert made.text == "qengine: error: no such model; need: another\n"


def test_engine_that_crashes_at_the_start_is_exit_1(folder: Path) -> None:
    fake_engine.write_script(folder, chain_map(b"abc"), crash="broken inside")
    made = ServerProcess(folder, FAKE, {}, {})
    assert made.wait() == 1, made.text
    assert "qengine: error: the engine could not start: RuntimeError: broken inside" in made.text


def test_port_in_use_is_one_line_and_exit_2(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = ServerProcess(folder, FAKE, {}, {"port": port})
        assert made.wait() == 2, made.text
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in made.text
    assert made.text.count("\n") == 1


def test_unreadable_chat_template_is_refused_before_the_engine_starts(folder: Path) -> None:
    fake_engine.write_script(folder, chain_map(b"abc"), build_s=60)
    made = ServerProcess(folder, FAKE, {}, {"chat_template": "nope.jinja"})
    assert made.wait(30) == 2
    assert "--chat-template" in made.text and made.text.count("\n") == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_while_starting_is_no_success(folder: Path, signum: int, code: int) -> None:
    fake_engine.write_script(folder, chain_map(b"abc"), build_s=60)
    made = ServerProcess(folder, FAKE, {}, {})
    until(lambda: engine_started(made), 20)
    made.process.send_signal(signum)
    assert made.wait(20) == code
    assert made.text.strip() == "qengine: stopped by a signal before the engine was ready"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_given_up_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """Neither a half-made folder in the cache nor one for sockets, nor a process: also after kill -9."""
    cache = tmp_path / "cache"
    with tempfile.TemporaryDirectory(dir="/tmp") as temp:
        monkeypatch.setenv("TMPDIR", temp)
        fake_engine.write_script(folder, chain_map(b"abc"), build_s=60, makes=str(cache / "model"))
        made = ServerProcess(folder, FAKE, {}, {})
        until(lambda: list(cache.glob(".model.partial-*")), 20)
        assert os.listdir(temp), "the sockets lie elsewhere"
        engine = made.engine_pid()
        made.process.send_signal(signum)
        assert made.wait(20) == (-signal.SIGKILL if signum == signal.SIGKILL else 128 + signum)
        until(lambda: not running_process(engine), 10)
        assert not list(cache.iterdir())
        assert os.listdir(temp) == []
        assert "Traceback" not in made.text


def running_process(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_terminal_signal_before_the_engine_process_is_up_changes_nothing(folder: Path) -> None:
    """Ctrl-C goes to both processes, and the engine's is left to its parent: also while it still imports."""
    made = ServerProcess(folder, FAKE, {}, {})
    try:
        until(lambda: engine_started(made), 20)
        for signum in (signal.SIGINT, signal.SIGTERM):
            os.kill(made.engine_pid(), signum)
        made.wait_ready()
        assert "Traceback" not in made.text
    finally:
        assert made.stop() == 0


def engine_started(made: ServerProcess) -> bool:
    try:
        return bool(made.engine_pid())
    except StopIteration:
        return False


def test_api_key(folder: Path) -> None:
    with running(folder, api_key=["first", "second"]) as made:
        assert httpx.get(made.url + "/health").status_code == 200
        assert httpx.get(made.url + "/version").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Bearer"}):
            for path in ("/v1/models", "/metrics"):
                found = httpx.get(made.url + path, headers=headers)
                assert found.status_code == 401
                assert found.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            with openai.OpenAI(base_url=made.url + "/v1", api_key=key, max_retries=0) as client:
                assert client.models.list().data
        client = openai.OpenAI(base_url=made.url + "/v1", api_key="wrong", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="m", messages=HI)


def test_api_key_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QENGINE_API_KEY", "secret")
    with running(folder) as made:
        assert httpx.get(made.url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(made.url + "/v1/models", headers=headers).status_code == 200


def test_model_without_a_chat_template(folder: Path) -> None:
    make_bytetok(folder, chat_template=None)
    for path in folder.glob("*.jinja"):
        path.unlink()
    with running(folder) as made:
        found = httpx.post(made.url + "/v1/chat/completions", json={"messages": HI})
        assert found.status_code == 400
        assert "--chat-template" in found.json()["error"]["message"]
        assert httpx.post(made.url + "/v1/completions", json={"prompt": "x"}).status_code == 200


def test_chat_templates_of_the_server_and_of_requests(folder: Path) -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}!"
    make_bytetok(folder, add_bos=True)
    with running(folder, chat_template=template, trust_request_chat_template=True) as made:
        found = httpx.post(made.url + "/tokenize", json={"messages": HI}).json()
        assert found["tokens"] == [256, *b"hi!"], "exactly one bos, though the tokenizer would add one, too"
        own = {"messages": HI, "chat_template": "<{{ messages[0]['content'] }}>"}
        assert httpx.post(made.url + "/tokenize", json=own).json()["tokens"] == list(b"<hi>")
        plain = httpx.post(made.url + "/tokenize", json={"prompt": "hi"}).json()
        assert plain["tokens"] == [256, *b"hi"]
