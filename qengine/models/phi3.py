"""Phi-3 and Phi-4 (text, dense): q/k/v and gate/up fused on disk, LongRoPE, partial rotation."""

from __future__ import annotations

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import read_rope, read_shape

ROPE_TYPES = ("default", "longrope")


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    rules = LayerRules(qkv=("qkv_proj",), gate_up=("gate_up_proj",), sliding_window=config.sliding_window)
    rotary = Rotary(ctx, read_rope(config, shape.head_dim, partial=True, types=ROPE_TYPES))
    return Decoder(ctx, shape, [rules] * shape.num_layers, lambda i: rotary)
