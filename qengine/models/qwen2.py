"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in the upper layers where it is on."""

from __future__ import annotations

from typing import Any

from qengine.layers.module import ModelContext
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, LayerRules
from qengine.models.settings import layer_windows, read_rope, read_shape


def windows(config: Any, num_layers: int) -> list[int | None]:
    """Window of each layer. `use_sliding_window` switches them on; without `layer_types`, layers from
    `max_window_layers` on slide."""
    if not getattr(config, "use_sliding_window", False):
        return [None] * num_layers
    if getattr(config, "layer_types", None) is not None:
        return layer_windows(config, num_layers)
    return [config.sliding_window if i >= config.max_window_layers else None for i in range(num_layers)]


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    rules = [LayerRules(qkv_bias=True, sliding_window=w) for w in windows(config, shape.num_layers)]
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, rules, lambda i: rotary)
