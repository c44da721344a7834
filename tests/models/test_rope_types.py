"""Every RoPE type against transformers, at lengths beyond the original context."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Olmo2Config, Phi3Config, PretrainedConfig

from hf_reference import (
    VOCAB,
    assert_equal_to_reference,
    context,
    loaded,
    random_sequences,
    reference_logits,
    reference_model,
    worst,
)
from qengine.layers.rotary import RopeSpec, Rotary, inverse_frequencies
from qengine.models.blocks import Decoder
from qengine.models.registry import build_model
from torch_kv import PagedRun

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LLAMA = {
    "linear": (16, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (16, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic-within": (64, {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (64, YARN),
    "yarn-attention-factor": (64, YARN | {"attention_factor": 1.3}),
    "yarn-mscale": (64, YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}),
    "yarn-betas": (64, YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
    "llama3": (
        64,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
}


def plain_rotation(model: Decoder) -> None:
    for rotary in model.rotaries:
        spec = rotary.spec
        plain = RopeSpec("default", spec.theta * 0.9, spec.rotary_dim, spec.max_position, spec.max_position)
        rotary.inv_freq, rotary.scale = inverse_frequencies(plain, 64)


@pytest.mark.parametrize("case", LLAMA)
def test_llama_rope_types(case: str) -> None:
    max_position, parameters = LLAMA[case]
    config = LlamaConfig(
        **SIZES, max_position_embeddings=max_position, rope_parameters={"rope_theta": 500.0, **parameters}
    )
    # one sequence as long as max_model_len: transformers' dynamic type goes by the length it sees
    assert_equal_to_reference(config, plain_rotation, lengths=(48,), max_model_len=48)


def phi3(**parameters: Any) -> Phi3Config:
    count = int(32 * parameters.get("partial_rotary_factor", 1.0)) // 2
    return Phi3Config(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0 + 0.1 * i for i in range(count)],
            "long_factor": [1.5 + 0.3 * i for i in range(count)],
            **parameters,
        },
    )


PHI3 = {
    "short": (phi3(), (16, 9, 3), 16),
    "long": (phi3(), (17, 40), 48),
    "long-partial": (phi3(partial_rotary_factor=0.5), (17, 40), 48),
    "attention-factor": (phi3(attention_factor=1.25), (17, 40), 48),
}


@pytest.mark.parametrize("case", PHI3)
def test_longrope_goes_by_max_model_len(case: str) -> None:
    config, lengths, max_model_len = PHI3[case]
    assert_equal_to_reference(config, plain_rotation, lengths=lengths, max_model_len=max_model_len)


def test_partial_rotation() -> None:
    config = Phi3Config(**SIZES, max_position_embeddings=64, partial_rotary_factor=0.25)
    assert_equal_to_reference(config, plain_rotation)


def test_gemma3_scales_only_global_layers() -> None:
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=32,
        sliding_window_pattern=2,
        max_position_embeddings=64,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )

    def scale_local_too(model: Decoder) -> None:
        local = next(r for r in model.rotaries if r.spec.type == "default")
        local.inv_freq = local.inv_freq / 8

    assert_equal_to_reference(config, scale_local_too)


def test_rotaries_are_shared_by_layers() -> None:

    model = build_model(context(LlamaConfig(**SIZES, max_position_embeddings=64)))
    assert isinstance(model, Decoder) and len(model.rotaries) == 1
    assert all(isinstance(layer.attention.rotary, Rotary) for layer in model.layers)


@pytest.mark.parametrize("family", [LlamaConfig, Olmo2Config])
def test_a_max_model_len_beyond_the_models_own_counts_as_that(family: type[PretrainedConfig]) -> None:
    """So the engine may ask for "as much as there is" before it knows how much that is."""
    config = family(
        **SIZES,
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    )
    reference = reference_model(config)
    sequences = random_sequences((48,))
    model = loaded(reference, max_model_len=1 << 30)
    assert model.max_position == 48
    assert worst(PagedRun(model, sequences).run(), reference_logits(reference, sequences)) < 1e-4
