"""Mistral 7B and its kin: Llama with one sliding window in all layers."""

from __future__ import annotations

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import read_rope, read_shape, refuse


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    types = getattr(config, "layer_types", None)
    if types is not None and len(set(types)) > 1:
        raise refuse(config, "layer_types", "Mistral has one kind of layer", hint='model_type "ministral"')
    shape = read_shape(config)
    rules = LayerRules(sliding_window=config.sliding_window)
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, [rules] * shape.num_layers, lambda i: rotary)
