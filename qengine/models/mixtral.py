"""Mixtral: Mistral with experts in every layer, the best of them weighted to a sum of 1."""

from __future__ import annotations

from qengine.layers.module import ModelContext
from qengine.layers.moe import ExpertNames, MoESpec, SparseMoE
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import read_rope, read_shape
from qengine.models.settings_moe import read_experts

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    experts, top_k = read_experts(config, "num_local_experts")
    spec = MoESpec(experts, top_k, shape.hidden_size, shape.intermediate_size, shape.activation, normalize=True)
    rules = LayerRules(
        sliding_window=config.sliding_window,
        feed_forward=lambda ctx, layer: SparseMoE(ctx, f"{layer}.{NAMES.block}", spec, NAMES),
    )
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, [rules] * shape.num_layers, lambda i: rotary)
