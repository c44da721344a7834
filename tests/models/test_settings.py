"""Configs: both spellings of RoPE settings, the longest context, and refusals by field name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import BertConfig, Gemma2Config, LlamaConfig, MistralConfig, PretrainedConfig, T5Config

from hf_reference import context
from qengine.errors import CheckpointError
from qengine.models.registry import NATIVE, build_model
from qengine.models.settings import layer_windows, max_position, read_rope, read_shape, rope_parameters

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def plain(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model_type": "llama", "max_position_embeddings": 1024, **fields})


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_both_spellings_of_rope_mean_the_same(kind: str) -> None:
    old = plain(rope_theta=5e5, rope_scaling={kind: "llama3", **LLAMA3})
    new = plain(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3})
    a, b = read_rope(old, 64), read_rope(new, 64)
    assert (a.type, a.theta, a.original_max_position) == ("llama3", 5e5, 128)
    assert (a.type, a.theta, a.rotary_dim, a.max_position, a.original_max_position) == (
        b.type,
        b.theta,
        b.rotary_dim,
        b.max_position,
        b.original_max_position,
    )
    assert dict(a.parameters) == dict(b.parameters)


def test_plain_rope_of_old_configs() -> None:
    assert rope_parameters(plain(rope_theta=1e6)) == {"rope_theta": 1e6, "rope_type": "default"}
    assert rope_parameters(plain())["rope_theta"] == 10000.0
    assert rope_parameters(plain(rope_scaling={"type": "su"}))["rope_type"] == "longrope"


def test_old_gemma3_spelling_has_two_thetas() -> None:
    config = plain(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert rope_parameters(config, "full_attention") == {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    assert rope_parameters(config, "sliding_attention") == {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1024),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 1024),
    ],
)
def test_max_position(fields: dict[str, Any], want: int) -> None:
    assert max_position(plain(**fields)) == want


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "ntk-42", "factor": 2.0}}, ["rope type 'ntk-42'", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, ["short_factor", "32"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "above 0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, ["factor", "above 0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, ["factor", "above 0"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": -4}}, ["high_freq_factor"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 0], "long_factor": [1]}}, ["short_factor"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"rope_theta": "x"}, ["rope_theta"]),
        ({"original_max_position_embeddings": "x"}, ["original_max_position_embeddings"]),
    ],
)
def test_rope_refusals_name_the_field(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as e:
        read_rope(plain(**fields), 64)
    assert all(w in str(e.value) for w in words), str(e.value)


SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def test_shape_defaults() -> None:
    shape = read_shape(plain(**SHAPE))
    assert (shape.num_kv_heads, shape.head_dim, shape.activation) == (4, 16, "silu")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "mish"}, ["hidden_act", "mish", "silu"]),
        ({"hidden_activation": "mish"}, ["hidden_activation", "mish"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "4"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"head_dim": -16}, ["head_dim", "-16"]),
        ({"head_dim": 16.5}, ["head_dim", "16.5"]),
    ],
)
def test_shape_refusals_name_the_field(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as e:
        read_shape(plain(**SHAPE | fields))
    assert all(w in str(e.value) for w in words), str(e.value)


def test_layer_windows() -> None:
    types = ["sliding_attention", "full_attention"]
    assert layer_windows(plain(layer_types=types, sliding_window=8), 2) == [8, None]
    assert layer_windows(plain(sliding_window=8), 2) == [8, 8]
    with pytest.raises(CheckpointError, match="linear_attention"):
        layer_windows(plain(layer_types=["linear_attention"] * 2, sliding_window=8), 2)
    with pytest.raises(CheckpointError, match="2 entries for 3"):
        layer_windows(plain(layer_types=types, sliding_window=8), 3)


TOY = {k: SHAPE[k] for k in SHAPE if k not in ("rms_norm_eps", "hidden_act")} | {"num_key_value_heads": 2}


def named(config: PretrainedConfig, architecture: str) -> PretrainedConfig:
    config.architectures = [architecture]
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (T5Config(), ["t5", "encoder-decoder", "LlamaForCausalLM"]),
        (named(BertConfig(), "BertForMaskedLM"), ["BertForMaskedLM", "not a causal", "Qwen3ForCausalLM"]),
        (named(LlamaConfig(), "LlamaForSequenceClassification"), ["LlamaForSequenceClassification"]),
        (Gemma2Config(**TOY, use_bidirectional_attention=True), ["use_bidirectional_attention"]),
        (
            MistralConfig(**TOY, layer_types=["full_attention", "sliding_attention"]),
            ["layer_types", "ministral"],
        ),
    ],
)
def test_models_that_are_refused(config: PretrainedConfig, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as e:
        build_model(context(config))
    assert all(w in str(e.value) for w in words), str(e.value)


def test_building_reads_and_allocates_nothing() -> None:
    ctx = context(LlamaConfig(**TOY))
    model = build_model(ctx)
    assert all(not leaf.buffers() for leaf in ctx.leaves)
    assert len(ctx.attention) == 2 and ctx.attention[1].name == "model.layers.1.self_attn"
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_position) == (96, 64, 2, 2048)


def test_native_families_are_known_by_both_names() -> None:
    assert {a for a, _ in NATIVE.values()} >= {"LlamaForCausalLM", "Gemma3ForCausalLM"}
