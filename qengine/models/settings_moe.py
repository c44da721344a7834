"""What the config of a mixture of experts says, checked: how many experts, and which layers have them."""

from __future__ import annotations

from typing import Any

from qengine.models.settings import positive, refuse


def read_experts(config: Any, field: str) -> tuple[int, int]:
    """(experts of a layer, experts that a token takes). `field` is where the family states the former."""
    experts, top_k = positive(config, field), positive(config, "num_experts_per_tok")
    if top_k > experts:
        raise refuse(config, "num_experts_per_tok", f"a token cannot take more than all {experts} experts")
    return experts, top_k


def sparse_layers(config: Any, num_layers: int) -> list[bool]:
    """Which layers have experts (Qwen's rule): every `decoder_sparse_step`-th, counted from 1, unless
    `mlp_only_layers` lists it; none where the config has no experts."""
    step = positive(config, "decoder_sparse_step")
    dense = getattr(config, "mlp_only_layers", None) or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise refuse(config, "mlp_only_layers", "a list of layer numbers is needed")
    some = getattr(config, "num_experts", None) != 0
    return [some and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
