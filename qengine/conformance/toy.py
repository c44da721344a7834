"""A one-layer Llama as a real checkpoint folder, for checks that go through the loader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qengine.runtime.checkpoint_writer import CheckpointWriter, write_json

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 128, 256, 4, 2, 32, 64

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float16",
}

LAYER = "model.layers.0"
LINEARS = {
    f"{LAYER}.self_attn.q_proj": (HEADS * DIM, HIDDEN),
    f"{LAYER}.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    f"{LAYER}.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    f"{LAYER}.self_attn.o_proj": (HIDDEN, HEADS * DIM),
    f"{LAYER}.mlp.gate_proj": (INNER, HIDDEN),
    f"{LAYER}.mlp.up_proj": (INNER, HIDDEN),
    f"{LAYER}.mlp.down_proj": (HIDDEN, INNER),
}
"""(outputs, inputs) of each linear inside the layer."""


def other_tensors() -> dict[str, torch.Tensor]:
    """Everything but the linears of LINEARS, float16."""
    generator = torch.Generator().manual_seed(11)
    table, head = (torch.randn(VOCAB, HIDDEN, generator=generator).half() * 0.1 for _ in range(2))
    ones = {n: torch.ones(HIDDEN, dtype=torch.float16) for n in ("input_layernorm", "post_attention_layernorm")}
    norms = {f"{LAYER}.{name}.weight": t for name, t in ones.items()}
    norms["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.float16)
    return {"model.embed_tokens.weight": table, "lm_head.weight": head, **norms}


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> None:
    """config.json and model.safetensors."""
    write_json(folder / "config.json", CONFIG | {"quantization_config": dict(quantization)})
    writer = CheckpointWriter(folder)
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.finish()
