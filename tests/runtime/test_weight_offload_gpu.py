"""Offload on a real GPU: the same tokens and probabilities to the last bit, five times in a row, with and without
graphs; and memory as planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engines import MODELS, engine_for, said
from published_models import write_config
from qengine.config import EngineConfig
from qengine.core.offload import offload_layers
from qengine.errors import CapacityError
from qengine.runtime.decide import decide
from qengine.runtime.engine import Engine
from qengine.runtime.weight_stream import CudaLane
from toy_engine import request, run

pytestmark = pytest.mark.gpu
GIB = 2**30


def toy(folder: Path, name: str, **options: Any) -> Engine:
    return engine_for(folder, MODELS[name], **options)


@pytest.mark.parametrize("mode", [{}, {"enforce_eager": True, "async_scheduling": False}], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_five_times_the_same_bits(name: str, mode: dict[str, Any], tmp_path: Path) -> None:
    """From the second time on prompts are found in the prefix cache, in both engines."""
    resident, offloaded = toy(tmp_path, name, **mode), toy(tmp_path, name, cpu_offload_gb=100.0, **mode)
    assert (offloaded.runner.graphs is None) is bool(mode)
    assert resident.runner.weights is None and offloaded.runner.weights is not None
    assert len(offloaded.runner.weights.sources) == MODELS[name][0]["num_hidden_layers"]
    for turn in range(5):
        assert said(offloaded) == said(resident), f"turn {turn}"
    assert offloaded.stats().prefix_cache_hits > 0


def test_the_control_shows_weights_that_nobody_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = said(toy(tmp_path, "16-bit"))
    monkeypatch.setattr(CudaLane, "copy", lambda *_: None)
    monkeypatch.setattr(CudaLane, "wait", lambda *_: None)
    assert said(toy(tmp_path, "16-bit", cpu_offload_gb=100.0)) != want


SMALL = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize("quantised", ["16-bit", "awq"])
def test_memory_is_what_was_planned(quantised: str, tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen2.5-7B", quantised, **SMALL)
    settings: dict[str, Any] = {
        "model": str(tmp_path), "load_format": "dummy", "device": "cuda", "max_model_len": 2048, "max_num_seqs": 8,
        "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": GIB // 2,
    }  # fmt: skip
    units = decide(EngineConfig(**settings)).memory.inputs.units
    asked = EngineConfig(**settings, cpu_offload_gb=offload_layers(units, 7).nbytes / GIB)
    plan = decide(asked).memory
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = Engine.from_config(asked)
    report = "\n".join(engine.facts.report)
    apart = re.search(r"Weights and KV cache: planned .* \(([\d.]+)% apart\)", report)
    assert apart is not None and float(apart[1]) <= 2.0, report
    run(engine, [request(str(i), [i + 1] * 500, max_tokens=16) for i in range(8)])
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * plan.planned, "loading and serving, at most"
    weights = engine.runner.weights
    assert weights is not None and len(weights.sources) == 7
    pinned = sum(source.bytes.numel() for source in weights.sources)
    moved = plan.inputs.offloaded.nbytes
    assert moved * 0.98 <= pinned <= 1.1 * moved and all(source.bytes.is_pinned() for source in weights.sources)
    for part in ("7 of 12 decoder layers", "of pinned host memory for", "copies run at"):
        assert part in report, report


def test_host_memory_is_checked_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qengine.runtime import plan_input

    monkeypatch.setattr(plan_input, "HOST_RESERVE", 1 << 60)
    with pytest.raises(CapacityError, match="host memory does not hold the weights"):
        toy(tmp_path, "16-bit", cpu_offload_gb=1.0)
