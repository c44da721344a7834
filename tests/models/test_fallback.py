"""Decoders that run through transformers' own modules: equal to transformers on mixed paged batches, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    PretrainedConfig,
    Starcoder2Config,
)

from hf_reference import SIZES as FAMILY_SIZES
from hf_reference import (
    VOCAB,
    assert_equal_to_reference,
    context,
    loaded,
    random_sequences,
    reference_logits,
    reference_model,
)
from qengine.errors import CheckpointError
from qengine.models.fallback import FallbackModel
from qengine.models.fallback_attention import MaskRule
from qengine.models.fallback_modules import FallbackLinear, ModuleTensors
from qengine.models.model import Model
from qengine.models.registry import build_model, native_builder
from torch_kv import PagedRun
from torch_linear import load_leaves

SIZES = FAMILY_SIZES | {"num_hidden_layers": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
}


def change_spec(**changes: Callable[[Any], Any]) -> Callable[[Model], None]:
    def spoil(model: Model) -> None:
        for layer in model.attention:
            fields = {k: f(getattr(layer.spec, k)) for k, f in changes.items() if getattr(layer.spec, k) is not None}
            layer.spec = replace(layer.spec, **fields)

    return spoil


def no_frozen_rope(model: Model) -> None:
    assert isinstance(model, FallbackModel)
    rotary = model.decoder.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq * 0.8


def skip_norm(model: Model) -> None:
    leaf = next(n for n in model.leaves if isinstance(n, ModuleTensors) and n.name.endswith("q_norm"))
    leaf.module.weight.fill_(1.0)


def shift_positions(model: Model) -> None:
    decoder, forward = model.decoder, model.decoder.forward
    decoder.forward = lambda **kw: forward(**kw | {"position_ids": kw["position_ids"] + 1})


def no_logit_scale(model: Model) -> None:
    model.causal.config.logits_scaling = 1.0


CASES: dict[str, tuple[PretrainedConfig, Callable[[Model], None]]] = {
    "granite": (
        GraniteConfig(**SIZES, embedding_multiplier=1.5, residual_multiplier=0.5, attention_multiplier=0.3),
        change_spec(scale=lambda s: 0.25),
    ),
    "granite-logits": (GraniteConfig(**SIZES, logits_scaling=2.0, tie_word_embeddings=True), no_logit_scale),
    "olmo2": (Olmo2Config(**SIZES), skip_norm),
    "starcoder2": (Starcoder2Config(**SIZES, sliding_window=6), change_spec(sliding_window=lambda w: w + 1)),
    "cohere2-local-global": (
        Cohere2Config(**SIZES | {"num_hidden_layers": 4}, sliding_window=6),
        change_spec(sliding_window=lambda w: w + 1),
    ),
    "gpt2-learned-positions": (
        GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64),
        shift_positions,
    ),
    "opt-nested-decoder": (
        OPTConfig(vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4),
        shift_positions,
    ),
    "gpt-neox-fused": (
        GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
        change_spec(scale=lambda s: s * 1.1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fallback_logits_equal_transformers(case: str) -> None:
    config, spoil = CASES[case]
    assert native_builder(config) is None
    assert_equal_to_reference(config, spoil)


@pytest.mark.parametrize(
    ("rope", "max_position", "lengths", "max_model_len"),
    [
        ({"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}, 16, (48,), 48),
        (LONGROPE, 64, (17, 40), 48),
        (LONGROPE, 64, (16, 9), 16),
    ],
    ids=["dynamic", "longrope-long", "longrope-short"],
)
def test_fallback_rope_is_chosen_once(rope: Any, max_position: int, lengths: Any, max_model_len: int) -> None:
    config = Olmo2Config(**SIZES | {"max_position_embeddings": max_position}, rope_parameters=rope)
    assert_equal_to_reference(config, no_frozen_rope, lengths=lengths, max_model_len=max_model_len)


def test_long_frequencies_do_not_change_with_the_text() -> None:
    """A short text under a long max_model_len uses the long frequencies, unlike transformers."""
    reference = reference_model(Olmo2Config(**SIZES, rope_parameters=LONGROPE))
    short, long = random_sequences((9,)), random_sequences((40,))
    model = loaded(reference, max_model_len=48)
    alone = PagedRun(model, short).run()[0]
    mixed = PagedRun(model, [short[0], long[0]]).run()[0]
    assert torch.allclose(alone, mixed, atol=1e-4)
    assert not torch.allclose(alone, reference_logits(reference, short)[0], atol=1e-2)


def test_fallback_builds_without_memory_and_names_what_it_needs() -> None:
    ctx = context(GraniteConfig(**SIZES))
    model = build_model(ctx)
    assert isinstance(model, FallbackModel)
    assert all(not leaf.buffers() for leaf in ctx.leaves)
    assert all(p.is_meta for p in model.causal.parameters())
    names = [name for leaf in ctx.leaves if isinstance(leaf, ModuleTensors) for name, _ in leaf.needs()]
    assert "model.layers.1.input_layernorm.weight" in names and "model.norm.weight" in names
    assert [a.name for a in ctx.attention] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert model.lm_head.name == "lm_head" and model.intermediate_size == 96
    assert sum(isinstance(m, FallbackLinear) for m in model.decoder.modules()) == 14


def test_the_callers_config_is_left_alone() -> None:
    config = GraniteConfig(**SIZES)
    before = config.to_dict()
    build_model(context(config))
    assert config.to_dict() == before
    assert not str(config._attn_implementation).startswith("qengine")


def test_bfloat16_linears_on_a_float32_stream() -> None:
    reference = reference_model(Olmo2Config(**SIZES))
    ctx = context(reference.config, dtype=torch.bfloat16)
    model = build_model(ctx)
    load_leaves(ctx.leaves, reference.state_dict())
    sequences = random_sequences((11, 7))
    for got, want in zip(PagedRun(model, sequences).run(5), reference_logits(reference, sequences), strict=True):
        assert got.dtype == torch.float32
        assert torch.cosine_similarity(got, want, dim=-1).min() > 0.999


def with_sinks() -> PretrainedConfig:
    return GptOssConfig(**SIZES, num_local_experts=1, num_experts_per_tok=1)


REFUSED: dict[str, tuple[PretrainedConfig, list[str]]] = {
    "alibi": (BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), ["bloom", "attention"]),
    "experts": (OlmoeConfig(**SIZES), ["olmoe", "mixture of experts", "64"]),
    "sinks": (with_sinks(), ["gpt_oss", "sinks"]),
    "latent attention": (
        DeepseekV3Config(**SIZES, n_routed_experts=1, num_experts_per_tok=1, first_k_dense_replace=2),
        ["deepseek_v3", "differ in size"],
    ),
    "recurrent": (BambaConfig(**SIZES), ["bamba", "recurrent"]),
    "convolution": (Lfm2Config(**SIZES, full_attn_idxs=[1]), ["lfm2", "conv"]),
    "multimodal": (Gemma3Config(), ["gemma3", "multimodal", "vision_config"]),
    "bidirectional": (BertConfig(**SIZES, tie_word_embeddings=False), ["bert", "not causal"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_fallback_refuses_by_name(case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(CheckpointError) as e:
        build_model(context(config))
    assert all(w in str(e.value) for w in words), str(e.value)


def test_mask_rules() -> None:
    assert MaskRule(lambda b, h, q, k: k <= q).window(64) is None
    assert MaskRule(lambda b, h, q, k: (k <= q) & (k > q - 6)).window(64) == 6
    assert MaskRule(lambda b, h, q, k: (k <= q) & (k > q - 600)).window(64) is None
    with pytest.raises(ValueError, match="changes with the position"):
        MaskRule(lambda b, h, q, k: (k <= q) & (k // 24 == q // 24)).window(64)
    with pytest.raises(ValueError, match="neither"):
        MaskRule(lambda b, h, q, k: k <= q + 1).window(64)
    with pytest.raises(ValueError, match="neither"):
        MaskRule(lambda b, h, q, k: (k <= q) & (k % 2 == 0)).window(64)
