"""config.json of published models, written by hand from their pages, and how they are quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}


def llama31(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return COMMON | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": scaling, "tie_word_embeddings": False,
    }  # fmt: skip


def qwen25(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 152064) -> dict[str, Any]:
    return COMMON | {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "use_sliding_window": False, "tie_word_embeddings": False,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": llama31(4096, 14336, 32, 32),
    "Llama-3.1-70B": llama31(8192, 28672, 80, 64),
    "Qwen2.5-7B": qwen25(3584, 18944, 28, 28, 4),
    "Qwen2.5-14B": qwen25(5120, 13824, 48, 40, 8),
    "Qwen2.5-32B": qwen25(5120, 27648, 64, 40, 8),
    "Qwen2.5-72B": qwen25(8192, 29568, 80, 64, 8),
    "Qwen3-30B-A3B": COMMON | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    },
    "Gemma-3-27B": COMMON | {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376,
        "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024,
        "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 168,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
}  # fmt: skip

QUANTISED: dict[str, dict[str, Any] | None] = {
    "16-bit": None,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def write_config(folder: Path, model: str, quantised: str = "16-bit", **changes: Any) -> Path:
    """A folder that holds nothing but the model's config.json."""
    config = MODELS[model] | changes
    settings = QUANTISED[quantised]
    if settings is not None:
        config = config | {"quantization_config": settings}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
