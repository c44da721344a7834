"""Offload on a real GPU: the same tokens and probabilities to the last bit, five times in a row, with and without
graphs; and memory as planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from published_models import write_config
from qengine.config import EngineConfig
from qengine.core.offload import offload_layers
from qengine.errors import CapacityError
from qengine.messages import RequestOutput
from qengine.runtime.decide import decide
from qengine.runtime.engine import Engine
from qengine.runtime.weight_stream import CudaLane
from toy_engine import request, run
from toy_models import awq_config, llama_config, write_json

pytestmark = pytest.mark.gpu
MIB, GIB = 2**20, 2**30
TOY: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "dtype": "bfloat16",
}  # fmt: skip
MOE = TOY | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "num_hidden_layers": 4,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "16-bit": (TOY, None),
    "awq": (TOY | {"attention_bias": True}, awq_config(128)),
    "gptq act-order": (TOY, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}),
    "fp8": (TOY, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "awq experts": (MOE, awq_config(128)),
    "16-bit experts": (MOE, None),
}


def toy(folder: Path, name: str, **options: Any) -> Engine:
    config, quant = MODELS[name]
    write_json(folder / "config.json", llama_config(**config, **({"quantization_config": quant} if quant else {})))
    settings: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "device": "cuda", "max_model_len": 256, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 8 * MIB,
    }  # fmt: skip
    return Engine.from_config(EngineConfig(**settings | options))


def said(engine: Engine) -> list[Any]:
    """Ids and logprobs of a few requests: prompts of one and of several chunks, together and alone."""
    prompts = [[7, 8, 9], list(range(100)), [5] * 40, [1]]
    answers: list[Any] = []
    for batch in (prompts, prompts[:1]):
        out = run(engine, [request(str(i), p, max_tokens=12, logprobs=3, ignore_eos=True) for i, p in enumerate(batch)])
        answers += [_told(out.outputs, str(i)) for i in range(len(batch))]
    return answers


def _told(outputs: list[RequestOutput], name: str) -> list[Any]:
    own = [out for out in outputs if out.request_id == name]
    return [(out.new_token_ids, out.logprobs) for out in own]


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
