"""Llama 1 to 3 and models of the same build (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import read_rope, read_shape


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    bias = bool(getattr(config, "attention_bias", False))
    rules = LayerRules(qkv_bias=bias, o_bias=bias, mlp_bias=bool(getattr(config, "mlp_bias", False)))
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, [rules] * shape.num_layers, lambda i: rotary)
