"""Memory while starting beside neighbours (CASES C19), and while serving for a while: what was planned stays true."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from qengine.errors import CapacityError
from qengine.runtime import device
from qengine.runtime.engine import Engine
from qengine.runtime.plan_input import CPU_RESERVE
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


def neighbour(monkeypatch: pytest.MonkeyPatch, at_first: int, then: int) -> None:
    """15 GiB in all; what is free is asked for when planning and again once the weights are there."""
    free = iter([at_first])
    monkeypatch.setattr(device, "memory", lambda d: device.DeviceMemory(15 * GIB, next(free, then)))
    monkeypatch.setattr(device, "neighbours", lambda d: ["trainer (pid 4711) 9.00 GiB"])


def start(tiny: Path, **options: Any) -> Engine:
    return toy_engine(tiny, gpu_memory_utilization=0.9, kv_cache_memory_bytes=None, **options)


def pool(engine: Engine) -> int:
    return engine.runner.cache.nbytes


def test_a_neighbour_that_frees_memory_meanwhile_is_no_trouble(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour(monkeypatch, 640 * MIB, 9 * GIB)
    engine = start(tiny)
    assert pool(engine) < 640 * MIB - CPU_RESERVE, "what was planned, not what is free now"
    assert run(engine, [request("a", [1, 2, 3])]).ids["a"]


def test_a_neighbour_that_grows_meanwhile_shrinks_the_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour(monkeypatch, 768 * MIB, 768 * MIB)
    before = pool(start(tiny))
    assert 200 * MIB < before < 768 * MIB - CPU_RESERVE
    neighbour(monkeypatch, 768 * MIB, 350 * MIB)
    engine = start(tiny)
    assert 60 * MIB < pool(engine) < 350 * MIB - CPU_RESERVE // 2 < before
    assert any("other processes have taken memory since the start" in line for line in engine.facts.report)
    assert run(engine, [request("a", [1, 2, 3])]).ids["a"]


def test_what_is_gone_is_refused_with_all_sides(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour(monkeypatch, 6 * GIB, CPU_RESERVE // 2 + 8 * MIB)
    with pytest.raises(CapacityError) as error:
        start(tiny, max_model_len=8192)
    for part in ("0.26 GiB free of 15.00 GiB", "6.00 GiB at the start", "trainer (pid 4711)", "8192 tokens"):
        assert part in str(error.value)


def test_an_allocation_that_fails_names_the_neighbours(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qengine.runtime import build

    def full(*arguments: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    neighbour(monkeypatch, 6 * GIB, 6 * GIB)
    monkeypatch.setattr(build, "allocate", full)
    with pytest.raises(CapacityError, match=r"other processes have taken memory.*trainer"):
        start(tiny)


def rss_growth(engine: Engine, rounds: int, after_each: Callable[[], object]) -> int:
    """Resident bytes that `rounds` of 32 requests add, of ever new texts, some cancelled half-way."""

    def serve(first: int) -> None:
        names = [f"{first}-{i}" for i in range(32)]
        prompts = [[(first * 7 + i * 13 + j) % 256 for j in range(5 + i)] for i in range(32)]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(request(name, prompt, max_tokens=6, temperature=float(int(name[-1]) % 2), logprobs=2))
        engine.step()
        engine.abort(names[::8])
        while engine.has_work:
            engine.step()
        after_each()

    for i in range(4):
        serve(-i)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    for i in range(rounds):
        serve(i + 1)
    gc.collect()
    engine.step()
    return process.memory_info().rss - before


ROUNDS, LEAK = 12, 1024 * 1024
FLAT = 2 * MIB


def test_nothing_grows_over_hundreds_of_requests(tiny: Path) -> None:
    engine = toy_engine(tiny, kv_cache_memory_bytes=2 * MIB, max_num_seqs=16, max_num_batched_tokens=128)
    kept = pool(engine)
    assert rss_growth(engine, ROUNDS, lambda: None) < FLAT
    assert pool(engine) == kept and engine.stats().kv_blocks_used == 0
    # Control: an engine that kept 16 KiB of every request would be seen.
    leak: list[bytes] = []
    assert rss_growth(engine, ROUNDS, lambda: leak.append(b"x" * LEAK)) > FLAT
