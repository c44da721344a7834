"""Every native family against transformers at toy size: float32, copied random weights, logits within 1e-4.

Each case names what makes the family special and a wrong control that breaks exactly that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hf_reference import SIZES, assert_equal_to_reference
from qengine.models.blocks import Decoder
from qengine.models.registry import native_builder

Spoil = Callable[[Any], None]


def attention_rule(**changes: Any) -> Spoil:
    """Change the AttentionSpec of every layer that has a value for it."""

    def spoil(model: Decoder) -> None:
        for layer in model.attention:
            fields = {k: f(getattr(layer.spec, k)) for k, f in changes.items() if getattr(layer.spec, k) is not None}
            layer.spec = replace(layer.spec, **fields)

    return spoil


def swap_head_norms(model: Decoder) -> None:
    for layer in model.layers:
        norm = layer.attention.head_norm
        assert norm is not None
        norm.norms = norm.norms[::-1]
        norm._weight = None


def halves_of_gate_up(model: Decoder) -> None:
    for layer in model.layers:
        op = layer.mlp.gate_up.ops[0]
        op.weight = op.weight.roll(op.weight.shape[0] // 2, 0)


def drop_bias(name: str) -> Spoil:
    def spoil(model: Decoder) -> None:
        for leaf in model.leaves:
            if leaf.name.endswith(name):
                leaf.ops[0].bias = None

    return spoil


def no_offset(model: Decoder) -> None:
    for layer in model.layers:
        layer.feed_forward_norm.weight -= 1


def one_rotary(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.rotary = model.rotaries[0]


def no_logit_cap(model: Decoder) -> None:
    model.logit_cap = None


def unscaled_embedding(model: Decoder) -> None:
    model.embedding.scale = None


def untie(model: Decoder) -> None:
    assert model.tied
    op = model.lm_head.ops[0]
    op.weight = op.weight.roll(1, 0)


def shift_one(window: int) -> int:
    return window + 1


CASES: dict[str, tuple[PretrainedConfig, Spoil]] = {
    "llama": (LlamaConfig(**SIZES), attention_rule(scale=lambda s: s * 1.1)),
    "llama-tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), untie),
    "llama-biases": (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), drop_bias("o_proj")),
    "llama-mlp-bias": (LlamaConfig(**SIZES, mlp_bias=True), drop_bias("down_proj")),
    "llama-head-dim": (LlamaConfig(**SIZES, head_dim=24), attention_rule(scale=lambda s: 0.25)),
    "mistral-window": (MistralConfig(**SIZES, sliding_window=6), attention_rule(sliding_window=shift_one)),
    "mistral-full": (MistralConfig(**SIZES, sliding_window=None), attention_rule(scale=lambda s: s * 1.1)),
    "qwen2": (Qwen2Config(**SIZES), drop_bias("q_proj")),
    "qwen2-window": (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        attention_rule(sliding_window=shift_one),
    ),
    "qwen3": (Qwen3Config(**SIZES, head_dim=32), swap_head_norms),
    "qwen3-bias": (Qwen3Config(**SIZES, head_dim=32, attention_bias=True), drop_bias("o_proj")),
    "phi3": (Phi3Config(**SIZES), halves_of_gate_up),
    "phi3-window": (Phi3Config(**SIZES, sliding_window=6), attention_rule(sliding_window=shift_one)),
    "gemma2": (
        Gemma2Config(**SIZES, head_dim=32, sliding_window=6, query_pre_attn_scalar=20, attn_logit_softcapping=2.0),
        attention_rule(soft_cap=lambda c: 1e6),
    ),
    "gemma2-window": (Gemma2Config(**SIZES, head_dim=32, sliding_window=6), attention_rule(sliding_window=shift_one)),
    "gemma2-norms": (Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=20), no_offset),
    "gemma2-logit-cap": (Gemma2Config(**SIZES, head_dim=32, final_logit_softcapping=3.0), no_logit_cap),
    "gemma2-embedding": (Gemma2Config(**SIZES, head_dim=32), unscaled_embedding),
    "gemma3": (
        Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=6, sliding_window_pattern=2),
        attention_rule(sliding_window=shift_one),
    ),
    "gemma3-ropes": (Gemma3TextConfig(**SIZES, head_dim=32, sliding_window_pattern=2), one_rotary),
    "gemma3-head-norm": (Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=20), swap_head_norms),
    "gemma3-head-dim-256": (
        Gemma3TextConfig(**SIZES | {"num_hidden_layers": 2}, head_dim=256),
        attention_rule(scale=lambda s: s * 1.1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    config, spoil = CASES[case]
    assert native_builder(config) is not None
    assert_equal_to_reference(config, spoil)
