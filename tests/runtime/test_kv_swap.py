"""Engines whose preempted requests and evicted prefixes go to host memory: the same tokens, the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from greedy_compare import first_clear_difference, greedy
from qengine.core import host_tier
from qengine.core.swap_policy import SwapCosts
from qengine.errors import CapacityError
from qengine.runtime import kv_swap
from qengine.runtime.device import DeviceMemory
from qengine.runtime.engine import Engine
from qengine.runtime.kv_host import HostBlocks, Pairs
from qengine.runtime.kv_swap import Measured, comes_back, measure, start_swapping, take_host_memory
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

PROMPT, NEW, POOL = 20, 60, 7
FAST = Measured(SwapCosts(1e-6, 0.0, 1e-3), 1e-6, 1e-6)


class Watched(HostBlocks):
    """Compares each block that comes back with the bytes that went."""

    def __init__(self, storage: list[torch.Tensor], num_blocks: int) -> None:
        super().__init__(storage, num_blocks)
        self.raw = storage
        self.gone: dict[int, list[torch.Tensor]] = {}
        self.compared = 0

    def copy_out(self, pairs: Pairs) -> None:
        self.gone |= {host: [t[block].clone() for t in self.raw] for block, host in pairs}
        super().copy_out(pairs)

    def copy_in(self, pairs: Pairs) -> None:
        super().copy_in(pairs)
        for host, block in pairs:
            assert all(torch.equal(t[block], was) for t, was in zip(self.raw, self.gone[host], strict=True))
            self.compared += 1


def small(large: Engine, folder: Path, **options: Any) -> Engine:
    """As `large`, with a pool in which four requests of PROMPT + NEW tokens have to take turns."""
    groups = len(large.pages.groups)
    per_block = large.runner.cache.nbytes // large.pages.pool.num_blocks
    return toy_engine(
        folder, **{**options, "kv_cache_memory_bytes": POOL * groups * per_block, "max_model_len": PROMPT + NEW}
    )


def swapping(engine: Engine, blocks: int = 100) -> Watched:
    host = Watched(engine.runner.cache.storage, blocks)
    engine.runner.host = host
    start_swapping(engine.pages, host, "auto", FAST)
    return host


def prompts(n: int = 4) -> list[list[int]]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(0, 250, (PROMPT,), generator=gen).tolist() for _ in range(n)]


def crowd(engine: Engine, **sampling: Any) -> dict[str, list[int]]:
    asked = [request(f"r{i}", p, max_tokens=NEW, ignore_eos=True, **sampling) for i, p in enumerate(prompts())]
    return run(engine, asked).ids


def clear_differences(large: Engine, engine: Engine) -> list[str]:
    """Where greedy ids part although the larger engine was sure: steps of other sizes round otherwise in 16 bits."""
    pairs = zip(greedy(large, prompts(), NEW), greedy(engine, prompts(), NEW), strict=True)
    return [found for a, b in pairs if (found := first_clear_difference(a, b, 0.1)) is not None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("swap")
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
    return {"full": make_tiny(root / "full"), "window": make_tiny(root / "window", **window)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("full", {"kv_cache_dtype": "k=fp8,v=auto,layers.0=auto", "async_scheduling": True}),
        ("full", {"enable_prefix_caching": False, "async_scheduling": True}),
        ("window", {"kv_cache_dtype": "fp8", "async_scheduling": False}),
    ],
    ids=["mixed-async", "uncached-async", "window"],
)
def test_nobody_notices(folders: dict[str, Path], model: str, options: dict[str, Any], device: str) -> None:
    options = {"device": device, "dtype": "half" if device == "cuda" else "float32", **options}
    large = toy_engine(folders[model], **options)
    engine = small(large, folders[model], **options)
    host = swapping(engine)
    if device == "cuda":
        differences = clear_differences(large, engine)
    else:
        sampled = {"temperature": 0.8, "seed": 5}
        differences = [] if crowd(large, **sampled) == crowd(engine, **sampled) else ["sampled ids"]
    assert not differences
    stats = engine.stats()
    assert stats.num_preemptions == stats.preemptions_swapped > 0
    assert stats.recomputed_tokens == 0 and host.compared > 0
    assert stats.swapped_in_bytes == host.compared * host.block_bytes
    assert stats.swapped_out_bytes >= host.block_bytes and stats.num_swapped == stats.host_blocks_used == 0


@pytest.fixture(scope="module")
def large(folders: dict[str, Path]) -> Engine:
    return toy_engine(folders["full"])


def test_an_evicted_prefix_comes_back(folders: dict[str, Path], large: Engine) -> None:
    engine = small(large, folders["full"])
    host = swapping(engine)
    ids = [run(engine, [request("a", prompts()[0] * 3, max_tokens=8)]).ids["a"]]
    run(engine, [request("b", prompts()[1] * 3, max_tokens=20), request("c", prompts()[2] * 3, max_tokens=20)])
    again = run(engine, [request("a", prompts()[0] * 3, max_tokens=8)])
    assert again.ids["a"] == ids[0]
    assert again.outputs[0].num_cached_tokens >= 48 and host.compared >= 2


class Shifted(HostBlocks):
    """The control: blocks that come back as their neighbours."""

    def copy_in(self, pairs: Pairs) -> None:
        super().copy_in([(host % self.num_blocks + 1, block) for host, block in pairs])


class Late(HostBlocks):
    """The control: blocks that are read when they are overwritten already."""

    def copy_out(self, pairs: Pairs) -> None:
        self.late = pairs

    def copy_in(self, pairs: Pairs) -> None:
        super().copy_out(self.late)
        super().copy_in(pairs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_are_tried_at_start(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "STAGE_BYTES", 3 * 136)
    storage = [torch.zeros(20, width, dtype=torch.uint8, device=device) for width in (96, 40)]
    for blocks in (1, 5, 40):
        assert comes_back(HostBlocks(storage, blocks))
    assert not comes_back(Shifted(storage, 5)) and not comes_back(Late(storage, 5))
    assert not any(bool(t.any()) for t in storage), "blocks are zero again"


def test_a_wrong_copy_is_seen(folders: dict[str, Path], large: Engine) -> None:
    want = crowd(large)
    engine = small(large, folders["full"])
    engine.runner.host = Shifted(engine.runner.cache.storage, 100)
    start_swapping(engine.pages, engine.runner.host, "swap", FAST)
    assert crowd(engine) != want


def test_costs_are_measured_and_said(folders: dict[str, Path], large: Engine) -> None:
    engine = small(large, folders["full"])
    host = take_host_memory(engine.runner, 20)
    assert host is not None and take_host_memory(engine.runner, 0) is None
    found = measure(engine.runner, host, 64, PROMPT + NEW)
    assert found.costs.move > 0 and found.costs.token > 0 and found.costs.start >= 0
    assert found.costs.move == pytest.approx(found.out + found.back)
    lines = start_swapping(engine.pages, host, "swap", found)
    assert any("20 blocks, 320 tokens; policy swap" in line for line in lines)
    slow = Measured(SwapCosts(1.0, 0.0, 1e-6), 0.5, 0.5)
    assert any(line.startswith("WARNING: computing K/V again is quicker") for line in start_swapping(
        engine.pages, host, "auto", slow))
    crowd(engine)
    stats = engine.stats()
    assert stats.num_preemptions > stats.preemptions_swapped == 0 == stats.swapped_out_bytes
    assert not any(bool(t[0].any()) for t in engine.runner.cache.storage), "the null block is clean again"


def test_memory_that_is_gone_or_refused_is_said(large: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = large.runner.cache.nbytes // large.pages.pool.num_blocks
    with monkeypatch.context() as patch:
        patch.setattr(kv_swap.devices, "memory", lambda device: DeviceMemory(per_block * 9, per_block * 9))
        assert take_host_memory(large.runner, 9) is not None
        with pytest.raises(CapacityError, match=r"--swap-space could not be pinned; have: .* free now.*need: .*locked"):
            take_host_memory(large.runner, 10)
        patch.setattr(kv_swap, "HostBlocks", refuse)
        with pytest.raises(CapacityError, match="--swap-space could not be pinned; have: can't allocate memory"):
            take_host_memory(large.runner, 9)
    large.runner.host = None


def refuse(*_: object) -> HostBlocks:
    raise RuntimeError("can't allocate memory")


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_the_flag_on_a_gpu(folders: dict[str, Path], eager: bool) -> None:
    """Asked and done; the plan holds; steps of resumed requests are replayed like all others."""
    options = {"device": "cuda", "dtype": "half", "enforce_eager": eager}
    large = toy_engine(folders["full"], **options)
    engine = small(large, folders["full"], swap_space=0.05, swap_policy="swap", **options)
    report = "\n".join(engine.facts.report)
    blocks = int(0.05 * 2**30) // (large.runner.cache.nbytes // large.pages.pool.num_blocks)
    assert f"KV swap: 51.2 MiB of host memory, {blocks:,} blocks" in report and "policy swap" in report
    assert "KV swap measured: " in report and "apart" in report
    assert not [line for line in engine.facts.report if line.startswith("WARNING") and "apart" in line]
    assert engine.runner.host is not None and engine.runner.host.memory.is_pinned()
    assert clear_differences(large, engine) == []
    stats = engine.stats()
    assert stats.preemptions_swapped == stats.num_preemptions > 0 == stats.recomputed_tokens
    assert stats.swapped_in_bytes > 0
