"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qengine.layers.module import ModelContext
from qengine.layers.moe import ExpertNames, MoESpec, SparseMoE
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import DecoderShape, positive, read_rope, read_shape
from qengine.models.settings_moe import read_experts, sparse_layers

NAMES = ExpertNames()


def feed_forward(config: Any, shape: DecoderShape) -> Callable[[ModelContext, str], SparseMoE]:
    """Builds the feed-forward of a layer that has experts."""
    experts, top_k = read_experts(config, "num_experts")
    inner = positive(config, "moe_intermediate_size")
    spec = MoESpec(experts, top_k, shape.hidden_size, inner, shape.activation, bool(config.norm_topk_prob))
    return lambda ctx, layer: SparseMoE(ctx, f"{layer}.{NAMES.block}", spec, NAMES)


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    sparse = sparse_layers(config, shape.num_layers)
    experts = feed_forward(config, shape) if any(sparse) else None
    bias = bool(getattr(config, "attention_bias", False))
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    dense = LayerRules(qkv_bias=bias, o_bias=bias, head_norm=True, sliding_window=window)
    rules = [replace(dense, feed_forward=experts if has_experts else None) for has_experts in sparse]
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, rules, lambda i: rotary)
