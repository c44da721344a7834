"""Engines on a GPU over toy models with random weights, and all that they say, for comparing settings bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qengine.config import EngineConfig
from qengine.messages import RequestOutput
from qengine.runtime.engine import Engine
from toy_engine import request, run
from toy_models import awq_config, llama_config, write_json

MIB = 2**20
TOY: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "dtype": "bfloat16",
}  # fmt: skip
MOE = TOY | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "num_hidden_layers": 4,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "16-bit": (TOY, None),
    "awq": (TOY | {"attention_bias": True}, awq_config(128)),
    "gptq act-order": (TOY, GPTQ),
    "fp8": (TOY, FP8),
    "awq experts": (MOE, awq_config(128)),
    "16-bit experts": (MOE, None),
}
EXPERTS = {
    "awq experts": MODELS["awq experts"],
    "16-bit experts": MODELS["16-bit experts"],
    "gptq experts": (MOE, GPTQ | {"desc_act": False}),
    "fp8 experts": (MOE, FP8),
    "float16 awq experts": (MOE | {"dtype": "float16"}, awq_config(128)),
}


def engine_for(folder: Path, model: tuple[dict[str, Any], dict[str, Any] | None], **options: Any) -> Engine:
    config, quant = model
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
