"""Toy mixtures of experts as real Hugging Face folders, with random weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen2MoeConfig, Qwen3MoeConfig

from hf_reference import reference_model
from toy_models import BOS, EOS, PAD, VOCAB, make_bytetok

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
QWEN: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=64),
    "qwen3_moe": Qwen3MoeConfig(**QWEN, head_dim=32, norm_topk_prob=True),
}


def make_moe(
    folder: Path,
    family: str = "mixtral",
    *,
    in_memory_layout: bool = False,
    tokenizer: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Save a toy of `family` and return it. `in_memory_layout`: one tensor for all experts, as transformers 5 holds
    them, under its names; else the family's own files' layout. `config` fields replace the toy's."""
    settings = copy.deepcopy(FAMILIES[family])
    settings.update(config)
    model = reference_model(settings)
    model.save_pretrained(folder, save_original_format=not in_memory_layout)
    if tokenizer:
        make_bytetok(folder)
    return model
