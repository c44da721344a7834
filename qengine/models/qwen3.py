"""Qwen3 (dense): Llama with a norm on every query and key head; windows as in Qwen2."""

from __future__ import annotations

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.qwen2 import windows
from qengine.models.settings import read_rope, read_shape


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    bias = bool(getattr(config, "attention_bias", False))
    rules = [
        LayerRules(qkv_bias=bias, o_bias=bias, head_norm=True, sliding_window=w)
        for w in windows(config, shape.num_layers)
    ]
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, rules, lambda i: rotary)
