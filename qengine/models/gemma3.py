"""Gemma 3 (text): Gemma 2 with query and key norms, and another rotary embedding in the local layers."""

from __future__ import annotations

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder
from qengine.models.gemma2 import layer_rules
from qengine.models.settings import read_rope, read_shape


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    rules = layer_rules(config, shape.num_layers, head_norm=True)
    rotaries = {
        kind: Rotary(ctx, read_rope(config, shape.head_dim, layer_type=kind))
        for kind in sorted(set(config.layer_types[: shape.num_layers]))
    }
    return Decoder(
        ctx,
        shape,
        rules,
        lambda i: rotaries[config.layer_types[i]],
        embedding_scale=shape.hidden_size**0.5,
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )
