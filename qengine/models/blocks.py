"""The blocks that the native families share: attention, feed-forward, decoder layer, decoder.

A decoder keeps one residual stream in `residual_dtype`; every sublayer reads its norm in the compute dtype and adds
its result in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qengine.layers.activation import GatedActivation
from qengine.layers.attention import Attention
from qengine.layers.batch import Batch
from qengine.layers.embedding import Embedding
from qengine.layers.feeds import Feed
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.layers.norm import HeadNorm, RMSNorm
from qengine.layers.rotary import RopeAngles, Rotary
from qengine.models.model import Model, is_tied, output_layer
from qengine.models.settings import DecoderShape, max_position
from qengine.plugin import AttentionSpec

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
EMBEDDING = "model.embed_tokens"


class FeedForward(Protocol):
    """What follows attention in a layer. `width`: a third of the elements a token that live at once in it beside its
    input and result, which of a gated MLP is the intermediate size (gate, up, and their product)."""

    @property
    def width(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        ...

    def inputs(self) -> list[Linear]:
        """The linears that read x, the first of them for every token."""
        ...

    def feeds(self) -> list[Feed]:
        """The vectors inside that linears read."""
        ...


@dataclass(frozen=True)
class LayerRules:
    """How one decoder layer differs from plain Llama.

    `qkv` and `gate_up` are the checkpoint's names: several run fused here, one is already fused on disk. `norm_offset`
    1 is Gemma's weight - 1 on disk. `query_scale` multiplies q.k (None: head_dim ** -0.5). `post_norms` normalises each
    sublayer's output before it is added (Gemma); then `feed_forward_norm` names the norm in front of the feed-forward.
    `feed_forward` builds another feed-forward than the gated MLP, given the decoder layer's name.
    """

    qkv: tuple[str, ...] = QKV
    qkv_bias: bool = False
    o_bias: bool = False
    gate_up: tuple[str, ...] = GATE_UP
    mlp_bias: bool = False
    head_norm: bool = False
    norm_offset: float = 0.0
    query_scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    post_norms: bool = False
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward: Callable[[ModelContext, str], FeedForward] | None = None


class SelfAttention:
    """q, k, v projection, optional head norms, rotation, paged attention, output projection."""

    def __init__(self, ctx: ModelContext, name: str, shape: DecoderShape, rules: LayerRules, rotary: Rotary) -> None:
        h, kv, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.rotated, self.head_dim = h + kv, d
        outs = [h * d, kv * d, kv * d] if len(rules.qkv) == 3 else [(h + 2 * kv) * d]
        names = [f"{name}.{n}" for n in rules.qkv]
        self.qkv = Linear(ctx, names, shape.hidden_size, outs, bias=rules.qkv_bias)
        self.head_norm: HeadNorm | None = None
        if rules.head_norm:
            query, key = (
                RMSNorm(ctx, f"{name}.{n}", d, shape.norm_eps, rules.norm_offset) for n in ("q_norm", "k_norm")
            )
            self.head_norm = HeadNorm(query, key, h, kv)
        self.rotary = rotary
        scale = d**-0.5 if rules.query_scale is None else rules.query_scale
        self.attention = Attention(ctx, name, AttentionSpec(h, kv, d, scale, rules.sliding_window, rules.soft_cap))
        self.output = Linear(ctx, f"{name}.o_proj", h * d, shape.hidden_size, bias=rules.o_bias)

    def __call__(self, x: torch.Tensor, angles: dict[Rotary, RopeAngles], batch: Batch) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv[:, : self.rotated], qkv[:, self.rotated :]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        y = self.attention.rotated(qk, v, self.rotary, angles[self.rotary], batch)
        return self.output(y.to(x.dtype))

    def feeds(self) -> list[Feed]:
        """Attention averages values: a channel of the output projection's input comes from one row of the values."""
        spec = self.attention.spec
        heads = torch.arange(spec.num_heads) // spec.group
        rows = (self.rotated + heads)[:, None] * self.head_dim + torch.arange(self.head_dim)
        return [Feed([self.output], self.qkv, rows.flatten())]


def unscaled(linear: Linear, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """linear(x * scale) in float32, for rows x [T, in_features] and their scales [T, 1]. The bias is no part of what is
    scaled: a row of zeros shows it."""
    y = linear(x).float()
    if not linear.specs[0].bias:
        return y.mul_(scale)
    bias = linear(torch.zeros_like(x[:1])).float()
    return y.sub_(bias).mul_(scale).add_(bias)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, ctx: ModelContext, name: str, shape: DecoderShape, rules: LayerRules) -> None:
        h, i = shape.hidden_size, shape.intermediate_size
        self.width = i
        outs = [i, i] if len(rules.gate_up) == 2 else [2 * i]
        self.gate_up = Linear(ctx, [f"{name}.{n}" for n in rules.gate_up], h, outs, bias=rules.mlp_bias)
        self.activation = GatedActivation(shape.activation)
        self.down = Linear(ctx, f"{name}.down_proj", i, h, bias=rules.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; float32 where the compute dtype is float16, whose range a product of
        gate and up can leave in models that were trained in bfloat16."""
        gate_up = self.gate_up(x)
        if gate_up.dtype is not torch.float16:
            return self.down(self.activation(gate_up))
        y, scale = self.activation.scaled(gate_up)
        return unscaled(self.down, y, scale)

    def inputs(self) -> list[Linear]:
        return [self.gate_up]

    def feeds(self) -> list[Feed]:
        """The product with `up` is linear in it; the activation of `gate` is not."""
        return [Feed([self.down], self.gate_up, self.width + torch.arange(self.width))]


class DecoderLayer:
    """Attention and feed-forward on the residual stream. The sum before each norm is done by the norm itself."""

    def __init__(self, ctx: ModelContext, name: str, shape: DecoderShape, rules: LayerRules, rotary: Rotary) -> None:
        def norm(leaf: str) -> RMSNorm:
            return RMSNorm(ctx, f"{name}.{leaf}", shape.hidden_size, shape.norm_eps, rules.norm_offset)

        first = len(ctx.leaves)
        self.input_norm = norm("input_layernorm")
        self.attention = SelfAttention(ctx, f"{name}.self_attn", shape, rules, rotary)
        self.after_attention = norm("post_attention_layernorm") if rules.post_norms else None
        self.feed_forward_norm = norm(rules.feed_forward_norm)
        self.mlp: FeedForward
        if rules.feed_forward is None:
            self.mlp = GatedMLP(ctx, f"{name}.mlp", shape, rules)
        else:
            self.mlp = rules.feed_forward(ctx, name)
        self.after_mlp = norm("post_feedforward_layernorm") if rules.post_norms else None
        self.leaves = ctx.leaves[first:]

    def feeds(self) -> list[Feed]:
        """Every vector that this layer's linears read; producers after the feeds of their own inputs."""
        attention, mlp = self.attention, self.mlp
        return [
            Feed([attention.qkv], self.input_norm),
            *attention.feeds(),
            Feed(mlp.inputs(), self.feed_forward_norm),
            *mlp.feeds(),
        ]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, angles: dict[Rotary, RopeAngles], batch: Batch
    ) -> torch.Tensor:
        """x: the input norm's output. Adds attention to `residual`; returns what is still to be added to it."""
        x = self.attention(x, angles, batch)
        if self.after_attention is not None:
            x = self.after_attention(x)
        x = self.mlp(self.feed_forward_norm.add(x, residual))
        return x if self.after_mlp is None else self.after_mlp(x)


class Decoder(Model):
    """Embedding, layers, final norm, output layer: the whole model of every native family."""

    def __init__(
        self,
        ctx: ModelContext,
        shape: DecoderShape,
        rules: Sequence[LayerRules],
        rotary: Callable[[int], Rotary],
        embedding_scale: float | None = None,
        logit_cap: float | None = None,
    ) -> None:
        """`rules[i]` and `rotary(i)` belong to layer i; layers may share a Rotary."""
        super().__init__(ctx)
        self.vocab_size = shape.vocab_size
        self.hidden_size = shape.hidden_size
        self.num_layers = shape.num_layers
        self.max_position = max_position(ctx.config)
        self.tied = is_tied(ctx.config)
        self.embedding = Embedding(ctx, EMBEDDING, shape.vocab_size, shape.hidden_size, embedding_scale)
        self.layers = [
            DecoderLayer(ctx, f"model.layers.{i}", shape, rules[i], rotary(i)) for i in range(shape.num_layers)
        ]
        self.intermediate_size = max(layer.mlp.width for layer in self.layers)
        self.rotaries = list(dict.fromkeys(layer.attention.rotary for layer in self.layers))
        self.norm = RMSNorm(ctx, "model.norm", shape.hidden_size, shape.norm_eps, rules[0].norm_offset)
        self.lm_head = output_layer(ctx, "lm_head", EMBEDDING, shape.hidden_size, shape.vocab_size, bias=False)
        if self.tied:
            self.embedding.share(self.lm_head)
        self.logit_cap = logit_cap

    def forward(self, input_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        residual = self.embedding(input_ids)
        angles = {rotary: rotary.angles(batch.positions) for rotary in self.rotaries}
        first, *rest = self.layers
        x = first(first.input_norm(residual), residual, angles, batch)
        for layer in rest:
            x = layer(layer.input_norm.add(x, residual), residual, angles, batch)
        return self.norm.add(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.float32(hidden)
        if self.logit_cap is not None:
            logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)  # in place: a step's logits may be a gigabyte
        return logits
