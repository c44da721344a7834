"""Expert slots on a real GPU: the same tokens and probabilities to the last bit as with everything on the device, five
times in a row, with and without graphs; memory as planned; and kernels that read registered host memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engines import EXPERTS, engine_for, said
from qengine.config import EngineConfig
from qengine.runtime.decide import decide
from qengine.runtime.expert_slots import SlotLayers
from qengine.runtime.pinned import PinnedMemory
from qengine_kernels.expert_slots import CopyPart, SlotTables, copies_of, slots_for
from toy_engine import request, run

pytestmark = pytest.mark.gpu
OFFLOAD = {"cpu_offload_gb": 100.0}
MODES: list[dict[str, Any]] = [{}, {"enforce_eager": True, "async_scheduling": False}]


@pytest.mark.parametrize("mode", MODES, ids=["graphs", "eager"])
@pytest.mark.parametrize("name", EXPERTS)
def test_five_times_the_same_bits(name: str, mode: dict[str, Any], tmp_path: Path) -> None:
    """With 4 of 8 slots decodes of up to 2 sequences take experts from slots, others whole layers, in any order."""
    resident = engine_for(tmp_path, EXPERTS[name], **mode)
    slotted = engine_for(tmp_path, EXPERTS[name], expert_slots=4, **OFFLOAD, **mode)
    assert (slotted.runner.graphs is None) is bool(mode)
    slots = slotted.runner.expert_slots
    assert slots is not None and slots.use.most_tokens == 2, slotted.facts.report
    for turn in range(5):
        assert said(slotted) == said(resident), f"turn {turn}"
    stats = slotted.stats()
    assert 0 < stats.expert_cache_hits < stats.expert_cache_queries
    assert resident.stats().expert_cache_queries == 0


def test_the_control_shows_experts_in_wrong_slots(tmp_path: Path) -> None:
    want = said(engine_for(tmp_path, EXPERTS["awq experts"]))
    slotted = engine_for(tmp_path, EXPERTS["awq experts"], expert_slots=4, **OFFLOAD)
    slots = slotted.runner.expert_slots
    assert slots is not None
    for layer in slots.layers:
        layer.pool.copy_(layer.pool.roll(len(layer.pool) // 2))
    assert said(slotted) != want


def test_memory_is_what_was_planned_and_slots_are_said(tmp_path: Path) -> None:
    large = (EXPERTS["awq experts"][0] | {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 32},
             EXPERTS["awq experts"][1])  # fmt: skip
    engine = engine_for(tmp_path, large, expert_slots=8, **OFFLOAD)
    report = "\n".join(engine.facts.report)
    apart = re.search(r"Weights and KV cache: planned .* \(([\d.]+)% apart\)", report)
    assert apart is not None and float(apart[1]) <= 2.0, report
    assert "Expert slots: 8 of 32 experts in each of 4 layers" in report and "slots are not used" not in report, report
    assert "kernels read host memory at" in report, report
    slots = engine.runner.expert_slots
    assert slots is not None
    asked = EngineConfig(model=str(tmp_path), load_format="dummy", device="cuda", max_model_len=256, expert_slots=8,
                         kv_cache_memory_bytes=8 << 20, **OFFLOAD)  # type: ignore[arg-type] # fmt: skip
    planned = decide(asked).memory.inputs.offloaded.slots
    assert planned <= sum(layer.pool.numel() for layer in slots.layers) <= 1.02 * planned
    before = torch.cuda.memory_allocated()
    run(engine, [request(str(i), [i + 1] * 20, max_tokens=16) for i in range(4)])
    assert torch.cuda.memory_allocated() - before < 4 << 20


def test_a_kernel_that_cannot_read_host_memory_means_whole_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = said(engine_for(tmp_path, EXPERTS["awq experts"]))
    monkeypatch.setattr(SlotLayers, "check", lambda *_: False)
    engine = engine_for(tmp_path, EXPERTS["awq experts"], expert_slots=4, **OFFLOAD)
    assert engine.runner.expert_slots is None
    assert any("WARNING: expert slots are not used" in line for line in engine.facts.report)
    assert said(engine) == want


def test_kernels_read_registered_host_memory() -> None:
    """Experts of 2.5 MB, eight new ones a step, until all slots have been taken twice; every byte of what is left."""
    device, nbytes, experts = torch.device("cuda"), 5 << 19, 128
    memory = PinnedMemory(experts * nbytes, device)
    memory.bytes.random_(0, 256)
    pool = torch.zeros(64 * nbytes, dtype=torch.uint8, device=device)
    copies = copies_of([CopyPart(0, 0, nbytes)], memory.bytes, pool)
    tables = SlotTables.empty(experts, 64, torch.zeros(4, dtype=torch.int64, device=device))
    for i in range(16):
        slots_for(tables, torch.arange(8 * i, 8 * i + 8, device=device), copies)
    assert tables.counts.tolist()[:3] == [16, 128, 0]
    assert sorted(tables.expert_of.tolist()) == list(range(64, 128))
    for slot, expert in enumerate(tables.expert_of.tolist()):
        own = pool[slot * nbytes : (slot + 1) * nbytes].cpu()
        assert torch.equal(own, memory.bytes[expert * nbytes : (expert + 1) * nbytes])
