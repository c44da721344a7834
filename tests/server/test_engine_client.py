"""The process boundary, with a scripted engine in a real child process."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import fake_engine
from qengine.config import EngineConfig
from qengine.errors import EngineDeadError, UserError
from qengine.messages import NewRequest, RequestOutput
from qengine.sampling_params import SamplingParams
from qengine.server.engine_client import EngineClient
from toy_models import EOS, chain_map

FACTORY = "fake_engine:build"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_engine.write_script(tmp_path, chain_map(b"abc"))
    return tmp_path


def request(request_id: str, prompt: bytes = b"x", **sampling: object) -> NewRequest:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    return NewRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=params, eos_token_ids=[EOS])


async def start(folder: Path) -> EngineClient:
    return await EngineClient.start(EngineConfig(model=str(folder)), factory=FACTORY, heartbeat_s=0.1)


async def collect(client: EngineClient, *requests: NewRequest) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {r.request_id: [] for r in requests}
    async with client.submit(requests) as stream:
        async for output in stream:
            found[output.request_id].append(output)
    return found


async def until(condition, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.01)


def test_outputs_reach_their_own_requests(folder: Path) -> None:
    async def main() -> None:
        client = await start(folder)
        try:
            assert client.facts.vocab_size == 320
            both = await collect(client, request("r0"), request("r1", b"a"))
            ids = {k: [t for o in v for t in o.new_token_ids] for k, v in both.items()}
            assert ids == {"r0": [*b"abc", EOS], "r1": [*b"bc", EOS]}
            assert [v[-1].finish_reason for v in both.values()] == ["stop", "stop"]
            assert not client.streams
        finally:
            await client.shutdown()
        assert client.process.returncode == 0

    asyncio.run(main())


def test_leaving_the_context_aborts(folder: Path) -> None:
    async def main() -> None:
        client = await start(folder)
        try:
            endless = request("r0", ignore_eos=True, max_tokens=100_000)
            async with client.submit([endless]) as stream:
                async for _ in stream:
                    await until(lambda: client.stats.kv_blocks_used > 0)
                    break
            await until(lambda: client.stats.num_running == 0 and client.stats.kv_blocks_used == 0, 1.0)
        finally:
            await client.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_dead_engine_ends_its_requests_and_is_unhealthy(folder: Path, how: str) -> None:
    async def main() -> None:
        client = await start(folder)
        try:
            assert client.health(5).reason is None
            doomed = collect(client, request("r0", ignore_eos=True, max_tokens=100_000))
            waiting = asyncio.create_task(doomed)
            await until(lambda: client.stats.num_running == 1)
            if how == "killed":
                client.process.kill()
            else:
                client.send(request("r1", fake_engine.CRASH))
            with pytest.raises(EngineDeadError, match="signal 9" if how == "killed" else "scripted crash"):
                await waiting
            assert client.dead.is_set()
            assert "engine" in str(client.health(5).reason)
            with pytest.raises(EngineDeadError):
                await collect(client, request("r2"))
            if how == "raised":
                assert await client.process.wait() == 1
        finally:
            await client.shutdown()

    asyncio.run(main())


def test_stuck_engine_is_unhealthy(folder: Path) -> None:
    async def main() -> None:
        client = await start(folder)
        try:
            await asyncio.sleep(0.3)
            assert client.health(0.25).reason is None, "heartbeats of an idle engine count"
            os.kill(client.process.pid, signal.SIGSTOP)
            await until(lambda: client.health(0.25).reason is not None)
            assert "has not answered" in str(client.health(0.25).reason)
            os.kill(client.process.pid, signal.SIGCONT)
            await until(lambda: client.health(0.25).reason is None)
        finally:
            await client.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("effect", "error"), [({"refuse": "wrong folder"}, UserError), ({"crash": "broken"}, EngineDeadError)]
)
def test_start_errors_come_back(folder: Path, effect: dict, error: type, capfd) -> None:
    fake_engine.write_script(folder, chain_map(b"abc"), **effect)
    with pytest.raises(error, match=next(iter(effect.values()))):
        asyncio.run(start(folder))
    assert ("Traceback" in capfd.readouterr().err) == (error is EngineDeadError)


def test_process_ends_with_its_parent_and_ignores_terminal_signals(folder: Path) -> None:
    async def main() -> None:
        client = await start(folder)
        try:
            for signum in (signal.SIGTERM, signal.SIGINT):
                os.kill(client.process.pid, signum)
            assert await collect(client, request("r0")), "the parent decides when the engine stops"
            client.process.stdin.close()  # what the system does when the parent dies
            assert await asyncio.wait_for(client.process.wait(), 5) == 1
        finally:
            await client.shutdown()

    asyncio.run(main())
