"""Gemma 2: soft caps on attention and logits, local and global layers in turn, norms around every sublayer."""

from __future__ import annotations

from typing import Any

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import layer_windows, read_rope, read_shape, refuse


def layer_rules(config: Any, num_layers: int, head_norm: bool) -> list[LayerRules]:
    """Rules that Gemma 2 and 3 share."""
    if getattr(config, "use_bidirectional_attention", False):
        raise refuse(config, "use_bidirectional_attention", "qengine's attention is causal")
    bias = bool(getattr(config, "attention_bias", False))
    return [
        LayerRules(
            qkv_bias=bias,
            o_bias=bias,
            head_norm=head_norm,
            norm_offset=1.0,
            query_scale=config.query_pre_attn_scalar**-0.5,
            sliding_window=window,
            soft_cap=getattr(config, "attn_logit_softcapping", None),
            post_norms=True,
            feed_forward_norm="pre_feedforward_layernorm",
        )
        for window in layer_windows(config, num_layers)
    ]


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(
        ctx,
        shape,
        layer_rules(config, shape.num_layers, head_norm=False),
        lambda i: rotary,
        embedding_scale=shape.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
    )
