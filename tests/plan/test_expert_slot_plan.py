"""Plans with expert slots for a published mixture on a T4, against arithmetic written anew here; what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from published_models import write_config
from qengine.config import EngineConfig
from qengine.core.offload import OffloadUnit, offload_bytes, offload_layers
from qengine.errors import ConfigError
from qengine.runtime.plan_chart import segments
from qengine.runtime.plan_report import PlanReport, plan_report

GIB = 2**30
LAYERS, EXPERTS, TOP_K = 6, 128, 8
"""The first layers stand for all, as plans of thousands of experts take their time."""
EXPERT = 3 * 2048 * 768 * (4 + (16 + 8) / 128) / 8
"""Bytes of gate, up and down of Qwen3-30B-A3B in 4 bits, with a scale and a zero point for each 128 inputs."""
STEPS: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 16, "max_model_len": 4096}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("mixture"), "Qwen3-30B-A3B", "awq", num_hidden_layers=LAYERS)


def plan_for(folder: Path, gpu: str = "t4", **options: Any) -> PlanReport:
    return plan_report(EngineConfig(model=str(folder), **STEPS | options), gpu)


def test_slots_by_hand(mixture: Path) -> None:
    report = plan_for(mixture, cpu_offload_gb=100.0, expert_slots=32)
    memory = report.memory
    assert memory is not None and report.refused is None
    assert memory.offloaded_bytes == pytest.approx(LAYERS * EXPERTS * EXPERT, rel=1e-3), "experts and nothing else"
    assert memory.expert_slots == 32 and memory.expert_slot_bytes == pytest.approx(LAYERS * 32 * EXPERT, rel=1e-3)
    lines = dict(memory.lines)
    assert lines["expert slots (32 a layer)"] == memory.expert_slot_bytes
    assert lines["offload buffers"] == pytest.approx(2 * EXPERTS * EXPERT, rel=1e-3)
    assert memory.offload_ceiling == pytest.approx(12e9 / (LAYERS * EXPERTS * EXPERT), rel=1e-3)
    assert memory.slot_ceiling == pytest.approx(12e9 / (LAYERS * TOP_K * EXPERT), rel=1e-3)
    assert any("of one token when none of its experts has a slot" in line for line in memory.ceilings)
    assert any("32 of 128 experts" in note and "up to 4 tokens" in note for note in report.notes)
    assert any("--max-num-seqs 4 would keep every decode step so small" in note for note in report.notes)
    few = plan_for(mixture, cpu_offload_gb=100.0, expert_slots=32, max_num_seqs=4)
    assert not any("--max-num-seqs" in note for note in few.notes)
    assert sum(size for _, size in segments(memory)) == lines["device total"]
    without = plan_for(mixture, cpu_offload_gb=100.0).memory
    assert without is not None and without.expert_slots == 0 and without.slot_ceiling is None
    assert without.offloaded_bytes > memory.offloaded_bytes, "attention too"


def test_automatic_slots_are_the_most_that_fit(mixture: Path) -> None:
    tight: dict[str, Any] = {"gpu_memory_utilization": 0.2}
    memory = plan_for(mixture, cpu_offload_gb=None, expert_slots=None, **tight).memory
    assert memory is not None and memory.max_model_len == 4096 and len(memory.offloaded_layers) == LAYERS
    most = memory.expert_slots
    assert TOP_K <= most < EXPERTS
    more = plan_for(mixture, cpu_offload_gb=100.0, expert_slots=most + 1, **tight)
    assert more.refused is not None and f"--expert-slots {most}" in more.would_work
    assert plan_for(mixture, cpu_offload_gb=100.0, expert_slots=most, **tight).refused is None
    # More slots than experts are all of them, and said.
    capped = plan_for(mixture, cpu_offload_gb=1.0, expert_slots=500)
    assert any("is more than the 128 experts" in note for note in capped.notes)
    assert any("take all that offload saves" in note for note in capped.notes)
    # Where everything fits, nothing is offloaded and there is nothing to have slots for.
    roomy = plan_for(mixture, cpu_offload_gb=None, expert_slots=None)
    assert roomy.memory is not None and roomy.memory.expert_slots == roomy.memory.offloaded_bytes == 0
    assert any("nothing is offloaded" in note for note in roomy.notes)


def test_what_slots_take_and_leave() -> None:
    units = [OffloadUnit(str(i), GIB, 8, 2) for i in range(4)]
    moved = offload_layers(units, 4, 2)
    assert (moved.slots, moved.token_bytes, moved.saved) == (GIB, GIB, GIB)
    assert offload_layers(units, 4, 100).saved == -2 * GIB, "all experts have a slot, and layers a buffer"
    assert offload_bytes(units, 1, 2).units == (0,) and offload_bytes(units, 3 * GIB, 2).units == (0, 1, 2)
    assert math.isclose(offload_layers(units, 2, 3).slots, 2 * 3 / 8 * GIB)


def test_what_is_refused(mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--expert-slots are for experts that --cpu-offload-gb moves"):
        EngineConfig(model="x", expert_slots=8)
    with pytest.raises(ConfigError, match="--expert-slots is out of range"):
        EngineConfig(model="x", expert_slots=-1, cpu_offload_gb=1.0)
    few = plan_for(mixture, cpu_offload_gb=None, expert_slots=4)
    assert few.refused is not None and "must hold the experts of a token; have: 4; need: 8 or more" in few.refused
    dense = plan_for(write_config(tmp_path, "Qwen2.5-7B", "awq"), cpu_offload_gb=None, expert_slots=8)
    assert dense.refused is not None and "--expert-slots is for mixtures of experts" in dense.refused
