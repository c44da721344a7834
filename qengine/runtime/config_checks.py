"""Values in config.json that cannot be: refused before a config object or a model is made of them.

Building a model reads no data, but it takes time and memory for every layer, and a number in a JSON file costs nothing.
What the weight files hold bounds what a true config can say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
COUNTS: dict[str, int] = {
    **dict.fromkeys(LAYERS, 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(EXPERTS, 1 << 14),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "ffn_dim"), 1 << 24),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 24),
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 40,
}
"""Fields that make work or memory by themselves, and more than any model has of each."""

PACKED = 32
"""Weights that one stored element holds at most."""


POSITIVE = ("num_attention_heads", "n_head", "num_heads", "head_dim")
"""Counts that something is divided by, or that leave nothing where they are 0."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
DTYPES = ("dtype", "torch_dtype")


def check_values(raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the field, for a count of none, an epsilon that is no number, a dtype that torch
    does not have, and architectures that are no list."""
    for prefix, config in _parts(raw):
        for field in POSITIVE:
            if type(value := config.get(field)) is int and value < 1:
                raise CheckpointError(f"config.json: {prefix}{field} is not positive", have=value, need="1 or more")
        for field in EPSILONS:
            if isinstance(value := config.get(field), float) and not 0 <= value < math.inf:
                raise CheckpointError(f"config.json: {prefix}{field}", have=value, need="a finite number, 0 or more")
        for field in DTYPES:
            value = config.get(field)
            known = isinstance(getattr(torch, str(value).removeprefix("torch."), None), torch.dtype)
            if isinstance(value, str) and value != "auto" and not known:
                raise CheckpointError(f"config.json: {prefix}{field}", have=value, need="float16 | bfloat16 | float32")
    if isinstance(raw.get("architectures"), str):
        raise CheckpointError(
            "config.json: architectures is not a list", have=raw["architectures"], need=f"[\"{raw['architectures']}\"]"
        )


def _parts(raw: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    both = (("", raw), ("text_config.", raw.get("text_config")))
    return [(prefix, config) for prefix, config in both if isinstance(config, Mapping)]


def check_sizes(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError, naming the field, for a size that no model has or that the files are too small for.
    `tensors` may be empty (dummy weights)."""
    weights = PACKED * sum(math.prod(info.shape) for info in tensors.values())
    for prefix, config in _parts(raw):
        for field, most in COUNTS.items():
            value = config.get(field)
            if not isinstance(value, int) or isinstance(value, bool):
                continue  # what is no number is refused where it is used
            if tensors and field in LAYERS:
                most = min(most, len(tensors))
            elif weights and field not in ("max_position_embeddings", "head_dim"):
                most = min(most, weights)
            if value > most:
                raise CheckpointError(
                    f"config.json: {prefix}{field} is more than "
                    + ("these weight files can hold" if tensors else "any model has"),
                    have=value, need=f"at most {most}", hint="a config.json that fits the weights",
                )
