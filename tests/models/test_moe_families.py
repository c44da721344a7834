"""Mixtral, Qwen2-MoE and Qwen3-MoE against transformers at toy size, and what their configs may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from hf_reference import SIZES, assert_equal_to_reference, context, reference_model
from qengine.errors import CheckpointError
from qengine.layers.moe import SparseMoE
from qengine.models.blocks import Decoder, GatedMLP
from qengine.models.qwen2_moe import SharedExpertMoE
from qengine.models.registry import build_model, native_builder

Spoil = Callable[[Any], None]

QWEN: dict[str, Any] = {**SIZES, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}


def sparse_blocks(model: Decoder) -> list[SparseMoE]:
    found = [layer.mlp.experts if isinstance(layer.mlp, SharedExpertMoE) else layer.mlp for layer in model.layers]
    return [block for block in found if isinstance(block, SparseMoE)]


def change(**fields: Any) -> Spoil:
    """Change the MoESpec of every sparse layer."""

    def spoil(model: Decoder) -> None:
        assert sparse_blocks(model)
        for block in sparse_blocks(model):
            block.spec = replace(block.spec, **fields)

    return spoil


def next_expert(model: Decoder) -> None:
    for block in sparse_blocks(model):
        block.down.leaves = [*block.down.leaves[1:], block.down.leaves[0]]


def swap_gate_and_up(model: Decoder) -> None:
    for block in sparse_blocks(model):
        for leaf in block.gate_up.leaves:
            leaf.ops[0].weight = leaf.ops[0].weight.roll(leaf.out_features // 2, 0)


def open_shared_gate(model: Decoder) -> None:
    for layer in model.layers:
        layer.mlp.gate.ops[0].weight = torch.zeros(1, 64)


def swap_head_norms(model: Decoder) -> None:
    for layer in model.layers:
        norm = layer.attention.head_norm
        assert norm is not None
        norm.norms, norm._weight = norm.norms[::-1], None


def wider_window(model: Decoder) -> None:
    for layer in model.attention:
        if layer.spec.sliding_window is not None:
            layer.spec = replace(layer.spec, sliding_window=layer.spec.sliding_window + 1)


CASES: dict[str, tuple[PretrainedConfig, Spoil]] = {
    "mixtral": (MixtralConfig(**SIZES), change(normalize=False)),
    "mixtral-experts": (MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=3), next_expert),
    "mixtral-window": (MixtralConfig(**SIZES, sliding_window=6), wider_window),
    "mixtral-all": (MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=2), swap_gate_and_up),
    "qwen2": (Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=72), change(normalize=True)),
    "qwen2-normalised": (
        Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=72, norm_topk_prob=True),
        change(normalize=False),
    ),
    "qwen2-shared": (Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=72), open_shared_gate),
    "qwen2-window": (
        Qwen2MoeConfig(
            **QWEN, shared_expert_intermediate_size=72, use_sliding_window=True, sliding_window=6, decoder_sparse_step=2
        ),
        wider_window,
    ),
    "qwen3": (Qwen3MoeConfig(**QWEN, head_dim=32), change(normalize=True)),
    "qwen3-normalised": (Qwen3MoeConfig(**QWEN, head_dim=32, norm_topk_prob=True), change(normalize=False)),
    "qwen3-top-1": (Qwen3MoeConfig(**QWEN | {"num_experts_per_tok": 1}, attention_bias=True), change(top_k=2)),
    "qwen3-mlp-only": (Qwen3MoeConfig(**QWEN, head_dim=32, mlp_only_layers=[1]), swap_head_norms),
    "qwen3-every-second": (Qwen3MoeConfig(**QWEN, head_dim=32, decoder_sparse_step=2), next_expert),
    "qwen3-window": (Qwen3MoeConfig(**QWEN, use_sliding_window=True, sliding_window=6), wider_window),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    config, spoil = CASES[case]
    assert native_builder(config) is not None
    assert_equal_to_reference(config, spoil)


def test_which_layers_have_experts() -> None:
    def kinds(**fields: Any) -> list[bool]:
        model = build_model(context(Qwen3MoeConfig(**QWEN | {"num_hidden_layers": 6}, head_dim=32, **fields)))
        assert isinstance(model, Decoder)
        assert all(isinstance(layer.mlp, SparseMoE | GatedMLP) for layer in model.layers)
        return [isinstance(layer.mlp, SparseMoE) for layer in model.layers]

    assert kinds() == [True] * 6
    assert kinds(decoder_sparse_step=2) == [False, True] * 3
    assert kinds(decoder_sparse_step=2, mlp_only_layers=[1, 2]) == [False, False, False, True, False, True]
    reference = reference_model(Qwen3MoeConfig(**QWEN, head_dim=32, decoder_sparse_step=2, mlp_only_layers=[2]))
    assert [hasattr(layer.mlp, "experts") for layer in reference.model.layers] == [False, True, False]


def test_the_planner_hears_of_all_experts_of_a_token() -> None:
    one = build_model(context(MixtralConfig(**SIZES, num_experts_per_tok=1)))
    two = build_model(context(MixtralConfig(**SIZES, num_experts_per_tok=2)))
    assert one.intermediate_size >= 96 and two.intermediate_size >= 2 * one.intermediate_size - 1
    dense = build_model(context(Qwen3MoeConfig(**QWEN, head_dim=32, mlp_only_layers=[0, 1, 2])))
    assert dense.intermediate_size == 96


REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "too many": (MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=3), "num_experts_per_tok = 3.*all 2"),
    "none": (MixtralConfig(**SIZES, num_local_experts=0), "num_local_experts = 0"),
    "step": (Qwen3MoeConfig(**QWEN, decoder_sparse_step=0), "decoder_sparse_step = 0"),
    "shared": (
        Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=0),
        "shared_expert_intermediate_size = 0",
    ),
    "activation": (MixtralConfig(**SIZES, hidden_act="laplace"), "hidden_act = 'laplace'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_make_no_sense_are_refused_by_field(case: str) -> None:
    config, text = REFUSED[case]
    with pytest.raises(CheckpointError, match=text):
        build_model(context(config))
