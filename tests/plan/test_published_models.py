"""Plans for published models on usual GPUs, from config.json alone, against arithmetic written anew here."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from published_models import MODELS, write_config
from qengine.config import EngineConfig
from qengine.runtime.plan_report import PlanReport, plan_report

MIB, GIB = 2**20, 2**30
TOTAL = {"t4": 14.5, "a10": 22.0, "4090": 23.5, "a100-80": 79.1}
CONTEXT = 400 * MIB


def hand_weights(c: dict[str, Any], bits: float) -> dict[str, float]:
    """Bytes by kind. `bits` of a quantised weight, scales and zeros of its groups included; 16 for none."""
    h, i, layers, vocab = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["vocab_size"]
    d = c.get("head_dim", h // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    mlp = 3 * h * i
    if "num_experts" in c:
        mlp = c["num_experts"] * 3 * h * c["moe_intermediate_size"]
    linears = layers * (h * (q + 2 * kv) + q * h + mlp) * bits / 8
    bias = layers * (q + 2 * kv) * 2 if c["model_type"] == "qwen2" else 0
    router = layers * h * c.get("num_experts", 0) * 4
    head, table = vocab * h * 2, 0 if c["tie_word_embeddings"] else vocab * h * 2
    return {"linears": linears + bias, "router": router, "head": head, "table": table}


def hand_token_bytes(c: dict[str, Any], value_bytes: int) -> int:
    d = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    return c["num_hidden_layers"] * 2 * c["num_key_value_heads"] * d * value_bytes


def plan_for(folder: Path, gpu: str, **options: Any) -> PlanReport:
    return plan_report(EngineConfig(model=str(folder), **options), gpu)


BITS = {"16-bit": 16.0, "awq": 4 + (16 + 8) / 128, "fp8": 8 + 32 / 128**2}
"""Of a weight with its share of scales and zero points, which take a byte each on a GPU (half a byte in the file)."""
TILED_BITS = 4 + 32 / 128
"""4-bit linears on tensor cores (sm_80 and newer) keep the scale and the zero point of a group in one 32-bit word."""
CASES = [
    # model, weights, GPU, KV dtype, fits
    ("Llama-3.1-8B", "16-bit", "t4", "auto", False),
    ("Llama-3.1-8B", "16-bit", "a10", "auto", True),
    ("Llama-3.1-8B", "fp8", "t4", "fp8", True),
    ("Llama-3.1-70B", "awq", "a100-80", "auto", True),
    ("Llama-3.1-70B", "16-bit", "a100-80", "auto", False),
    ("Qwen2.5-7B", "awq", "t4", "fp8", True),
    ("Qwen2.5-14B", "awq", "t4", "auto", True),
    ("Qwen2.5-32B", "awq", "t4", "fp8", False),
    ("Qwen2.5-32B", "awq", "4090", "auto", True),
    ("Qwen2.5-72B", "awq", "a100-80", "fp8", True),
    ("Qwen3-30B-A3B", "awq", "4090", "auto", True),
    ("Gemma-3-27B", "awq", "4090", "auto", True),
    ("Gemma-3-27B", "16-bit", "a100-80", "auto", True),
]


@pytest.mark.parametrize(("model", "weights", "gpu", "kv", "fits"), CASES)
def test_plan_is_the_hand_arithmetic(model: str, weights: str, gpu: str, kv: str, fits: bool, tmp_path: Path) -> None:
    c = MODELS[model]
    options = {"max_num_batched_tokens": 2048, "max_num_seqs": 16}
    report = plan_for(write_config(tmp_path, model, weights), gpu, kv_cache_dtype=kv, **options)
    assert (report.refused is None) is fits, report.refused
    tiled = weights == "awq" and gpu != "t4" and "num_experts" not in c  # experts keep the layout of every chip
    by_hand = hand_weights(c, TILED_BITS if tiled else BITS[weights])
    budget = 0.92 * TOTAL[gpu] * GIB
    if not fits:
        assert report.memory is None and report.refused is not None and "need" in report.refused
        assert sum(by_hand.values()) > 0.9 * budget
        return
    memory = report.memory
    assert memory is not None
    lines = dict(memory.lines)
    found = sum(size for name, size in lines.items() if name.startswith("weights "))
    assert found == pytest.approx(sum(by_hand.values()), rel=0.005)
    per_value = 1 if kv == "fp8" else 2
    assert memory.token_bytes == pytest.approx(hand_token_bytes(c, per_value), rel=0.2 if "Gemma" in model else 1e-9)
    assert lines["device total"] == int(TOTAL[gpu] * GIB) and lines["free at start"] == int(TOTAL[gpu] * GIB) - CONTEXT
    assert abs(lines["budget"] - min(budget, lines["free at start"] - 256 * MIB)) < 2
    assert 0 <= lines["budget"] - memory.planned_bytes < memory.token_bytes * 16
    if "Gemma" not in model:
        # What is neither weights nor KV cache is at most 2 GiB with these steps, and the cache takes the rest.
        rest = lines["budget"] - found - memory.kv_tokens * memory.token_bytes
        assert 0 < rest < 2 * GIB


def test_kv_bytes_of_a_token_by_hand(tmp_path: Path) -> None:
    """Figures that many people know: 128 KiB for Llama-3.1-8B, 320 KiB for 70B, 56 KiB for Qwen2.5-7B."""
    known = (("Llama-3.1-8B", "a10", 128), ("Qwen2.5-7B", "a10", 56), ("Llama-3.1-70B", "b200", 320))
    for model, gpu, expected in known:
        memory = plan_for(write_config(tmp_path / model, model), gpu).memory
        assert memory is not None and memory.token_bytes == expected * 1024


def test_a_window_layer_holds_no_more_than_its_window(tmp_path: Path) -> None:
    """Gemma 3: of 62 layers 52 see 1024 tokens. A request of 128k tokens takes about a sixth of 62 full layers."""
    folder = write_config(tmp_path, "Gemma-3-27B", "awq")
    memory = plan_for(folder, "a100-80", max_model_len=131072, max_num_batched_tokens=2048).memory
    assert memory is not None
    kv = sum(size for name, size in memory.lines if name.startswith("KV cache"))
    one = kv / memory.concurrency
    full_layers = 10 * 2 * 16 * 128 * 2 * 131072
    assert full_layers < one < 1.35 * full_layers, "full layers, and windows of 1024 + a step"
    assert one < 0.25 * hand_token_bytes(MODELS["Gemma-3-27B"], 2) * 131072, "control: not all layers"


def test_tied_head_is_counted_once_on_a_gpu(tmp_path: Path) -> None:
    tied = plan_for(write_config(tmp_path / "a", "Qwen2.5-7B", tie_word_embeddings=True), "a100-80").memory
    own = plan_for(write_config(tmp_path / "b", "Qwen2.5-7B"), "a100-80").memory
    assert tied is not None and own is not None
    weights = [sum(s for n, s in m.lines if n.startswith("weights ")) for m in (tied, own)]
    assert weights[1] - weights[0] == 152064 * 3584 * 2


def test_a_small_card_takes_smaller_steps(tmp_path: Path) -> None:
    """Nothing asked for: 8192 tokens a step would take a T4's room for the KV cache."""
    folder = write_config(tmp_path, "Qwen2.5-7B", "awq")
    small, large = (dict(m.lines) for gpu in ("t4", "a100-80") if (m := plan_for(folder, gpu).memory) is not None)
    assert small["activations (peak)"] < 0.85 * large["activations (peak)"]
    asked = plan_for(folder, "t4", max_num_batched_tokens=8192).memory
    assert asked is not None
    saved = dict(asked.lines)["activations (peak)"] - small["activations (peak)"]
    assert saved > 300 * MIB


def test_step_rate_ceilings(tmp_path: Path) -> None:
    """C18: bytes over bandwidth. All but the embedding is read in a step; of a mixture, 8 of 128 experts."""
    memory = plan_for(write_config(tmp_path / "a", "Qwen2.5-7B"), "a100-80").memory
    w = hand_weights(MODELS["Qwen2.5-7B"], 16)
    assert memory is not None and memory.memory_ceiling == pytest.approx(2039e9 / (w["linears"] + w["head"]), rel=1e-3)
    c = MODELS["Qwen3-30B-A3B"]
    moe = plan_for(write_config(tmp_path / "b", "Qwen3-30B-A3B", "awq"), "a100-80").memory
    experts = c["num_hidden_layers"] * 128 * 3 * 2048 * 768 * BITS["awq"] / 8
    w = hand_weights(c, BITS["awq"])
    read = w["linears"] - experts * 120 / 128 + w["router"] + w["head"]
    assert moe is not None and moe.memory_ceiling == pytest.approx(2039e9 / read, rel=0.005)


def test_offload_by_hand(tmp_path: Path) -> None:
    """Llama-3.1-8B in 16 bits on a T4: whole layers of 436 MB go to host memory, two buffers of that size come."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    layer = (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) * 2
    asked = plan_for(folder, "t4", cpu_offload_gb=6.0, max_num_batched_tokens=2048, max_num_seqs=16)
    memory = asked.memory
    assert memory is not None and asked.refused is None
    count = math.ceil(6 * GIB / layer)
    assert memory.offloaded_bytes == count * layer and len(memory.offloaded_layers) == count
    lines = dict(memory.lines)
    assert lines["offloaded to host memory"] == -count * layer and lines["offload buffers"] == 2 * layer
    assert memory.offload_ceiling == pytest.approx(12e9 / (count * layer))
    numbers = [int(name.rpartition(".")[2]) for name in memory.offloaded_layers]
    gaps = {b - a for a, b in pairwise(numbers)}
    assert gaps <= {32 // count, 32 // count + 1}, "spread evenly"
    auto = plan_for(folder, "t4", cpu_offload_gb=None, max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=16)
    assert auto.memory is not None and auto.memory.max_model_len == 4096
    one_less = (len(auto.memory.offloaded_layers) - 1) * layer / GIB - 1e-6
    less = plan_for(
        folder, "t4", cpu_offload_gb=one_less, max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=16
    )
    assert less.refused is not None, "auto takes the fewest layers"
    capped = plan_for(folder, "t4", cpu_offload_gb=100.0, max_num_batched_tokens=2048, max_num_seqs=16)
    assert capped.memory is not None and len(capped.memory.offloaded_layers) == 32
    assert any("more than the layers hold" in note for note in capped.notes)


def test_four_gigabytes_over_twelve_are_three_steps() -> None:
    """C18's own number."""
    from qengine.core.offload import OffloadUnit, offload_layers

    moved = offload_layers([OffloadUnit(str(i), 10**9) for i in range(8)], 4)
    assert moved.nbytes == 4 * 10**9 and moved.units == (0, 2, 4, 6)
    assert 12e9 / moved.step_bytes == 3.0


def test_fp8_weights_keep_one_byte_on_a_t4(tmp_path: Path) -> None:
    """C10: without FP8 hardware the plan is weight-only, and resident bytes are the file's, not twice as many."""
    report = plan_for(write_config(tmp_path, "Qwen2.5-7B", "fp8"), "t4", max_num_batched_tokens=2048)
    assert report.refused is None and report.memory is not None
    kernel = next(text for name, text in report.kernels.items() if name.startswith("fp8"))
    assert kernel.startswith("emulated") and "weight-only" in kernel
    resident = next(size for name, size in report.memory.lines if name.startswith("weights fp8"))
    c = MODELS["Qwen2.5-7B"]
    in_file = hand_weights(c, 8)["linears"] * (1 + 4 / 128**2)
    assert abs(resident / in_file - 1) < 0.05
    assert report.choices["compute dtype"].startswith("float16 (sm_75 has no bfloat16; float32 accumulation")
    native = plan_for(tmp_path, "l4", max_num_batched_tokens=2048)
    assert next(text for name, text in native.kernels.items() if name.startswith("fp8")).startswith("native")
