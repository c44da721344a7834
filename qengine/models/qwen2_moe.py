"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts in some layers, beside them one that every token takes, gated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qengine.layers.feeds import Feed
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.layers.moe import ExpertNames, MoESpec, SparseMoE
from qengine.layers.rotary import Rotary
from qengine.models.blocks import Decoder, GatedMLP, LayerRules
from qengine.models.qwen2 import windows
from qengine.models.settings import DecoderShape, positive, read_rope, read_shape
from qengine.models.settings_moe import read_experts, sparse_layers

NAMES = ExpertNames()


class SharedGate(Linear):
    """How much of the shared expert each token takes: one number, before the sigmoid."""

    quantizable = False


class SharedExpertMoE:
    """experts(x) + sigmoid(gate(x)) * shared_expert(x)."""

    def __init__(self, ctx: ModelContext, name: str, spec: MoESpec, shared: DecoderShape) -> None:
        """`shared` is the shape whose intermediate size is the shared expert's."""
        self.experts = SparseMoE(ctx, name, spec, NAMES)
        self.shared = GatedMLP(ctx, f"{name}.shared_expert", shared, LayerRules())
        self.gate = SharedGate(ctx, f"{name}.shared_expert_gate", spec.hidden_size, 1)

    @property
    def width(self) -> int:
        return max(self.experts.width, self.shared.width) + self.experts.spec.hidden_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.experts(x).addcmul_(self.gate(x).sigmoid(), self.shared(x))

    def inputs(self) -> list[Linear]:
        return [*self.experts.inputs(), *self.shared.inputs(), self.gate]

    def feeds(self) -> list[Feed]:
        return [*self.experts.feeds(), *self.shared.feeds()]


def feed_forward(config: Any, shape: DecoderShape) -> Callable[[ModelContext, str], SharedExpertMoE]:
    """Builds the feed-forward of a layer that has experts."""
    experts, top_k = read_experts(config, "num_experts")
    inner = positive(config, "moe_intermediate_size")
    spec = MoESpec(experts, top_k, shape.hidden_size, inner, shape.activation, bool(config.norm_topk_prob))
    shared = replace(shape, intermediate_size=positive(config, "shared_expert_intermediate_size"))
    return lambda ctx, layer: SharedExpertMoE(ctx, f"{layer}.{NAMES.block}", spec, shared)


def build(ctx: ModelContext) -> Decoder:
    config = ctx.config
    shape = read_shape(config)
    sparse = sparse_layers(config, shape.num_layers)
    experts = feed_forward(config, shape) if any(sparse) else None
    dense = LayerRules(qkv_bias=bool(getattr(config, "qkv_bias", True)))
    rules = [
        replace(dense, sliding_window=window, feed_forward=experts if has_experts else None)
        for window, has_experts in zip(windows(config, shape.num_layers), sparse, strict=True)
    ]
    rotary = Rotary(ctx, read_rope(config, shape.head_dim))
    return Decoder(ctx, shape, rules, lambda i: rotary)
