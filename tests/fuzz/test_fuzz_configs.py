"""Configs that are garbage: a format's parser refuses with ValueError, a checkpoint with one UserError line, and no
claimed size makes anything slow or large."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_model import plan_folder
from qengine.errors import UserError
from qengine.plugin import LinearScheme, LinearSpec, TensorInfo
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime.safetensors_file import DTYPES
from toy_models import llama_config, make_tiny, make_tiny_awq, write_json

FUZZ = settings(max_examples=150)

NUMBERS = st.integers(-2, 130) | st.integers(-(1 << 70), 1 << 70) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

CT_ARGS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
VALID: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"], "backend": "autoawq"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
             "checkpoint_format": "gptq", "dynamic": {"-:.*o_proj": {}, "lm_head": {"bits": 8}}, "lm_head": False,
             "modules_in_block_to_quantize": [["q_proj"]], "meta": {"quantizer": ["gptqmodel:7.6.0"]},
             "pack_dtype": "int32", "static_groups": False},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "ignored_layers": ["lm_head"], "modules_to_not_convert": None, "kv_cache_scheme": "static",
            "scale_fmt": None, "weight_scale_semantics": "inverse", "weight_scale_method": "block",
            "dynamic": {"-:.*o_proj": {}, "+:.*up_proj": {"weight_scale_method": "row", "weight_block_size": None}}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "config_groups": {},
                 "kv_cache_scheme": {"num_bits": 8}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["x*"]}},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": CT_ARGS, "input_activations": None}},
        "ignore": ["lm_head", "re:.*gate"], "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
    },
}  # fmt: skip
PLUGINS = [r.name for r in list_plugins("weight") if r.name != "dense"]
LEAVES = st.sampled_from([
    "weight", "qweight", "qzeros", "scales", "scaled_zeros", "g_idx", "bias", "weight_scale", "weight_scale_inv",
    "input_scale", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "B", "s", "odd",
])  # fmt: skip
SHAPE = st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 64, 256, 512]), max_size=3)
SPEC = LinearSpec("model.layers.0.mlp.up_proj", 256, 512)
INFOS = st.dictionaries(LEAVES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPE), max_size=5)


@st.composite
def damaged(draw: st.DrawFn, valid: Mapping[str, Any]) -> dict[str, Any]:
    """A valid config in which some values, at any depth, are replaced, dropped or added."""

    def walk(value: Any) -> Any:
        if draw(st.integers(0, 7)) == 0:
            return draw(JSON)
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items() if draw(st.integers(0, 15)) > 0}
        return [walk(v) for v in value] if isinstance(value, list) else value

    out = {k: walk(v) for k, v in valid.items() if draw(st.integers(0, 15)) > 0}
    return out | draw(st.dictionaries(st.text(max_size=8), JSON, max_size=1))


def test_every_format_is_fuzzed() -> None:
    assert set(PLUGINS) == set(VALID)
    for name, config in VALID.items():
        load_plugin("weight", name).parse(config)  # control: what is damaged below is fine as it stands


@pytest.mark.parametrize("name", PLUGINS)
@FUZZ
@given(data=st.data())
def test_parsers_return_or_refuse(name: str, data: st.DataObject) -> None:
    config = data.draw(damaged(VALID[name]) | st.dictionaries(st.text(max_size=8), JSON, max_size=4))
    infos = data.draw(INFOS)
    headers = {leaf: TensorInfo(f"{SPEC.name}.{leaf}", dtype, tuple(shape)) for leaf, (dtype, shape) in infos.items()}
    try:
        scheme = load_plugin("weight", name).parse(config).scheme_for(SPEC, headers)
    except ValueError as e:
        assert str(e) and len(str(e)) < 4000
        return
    assert scheme is None or isinstance(scheme, LinearScheme)
    if scheme is not None:
        assert scheme.tensors(SPEC) and scheme.format and hash(scheme.key) is not None


KEYS = [*llama_config(), "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "quantization_config",
        "text_config", "torch_dtype", "architectures", "auto_map", "compression_config", "n_layer"]  # fmt: skip


def plans_or_refuses(folder: Path, config: object) -> None:
    write_json(folder / "config.json", config)
    try:
        plan_folder(folder)
    except UserError as e:
        assert str(e)


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=2))
def test_config_json_with_odd_values(changes: dict[str, Any], tmp_path: Path) -> None:
    if not (tmp_path / "model.safetensors").exists():
        make_tiny(tmp_path, tokenizer=False, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16,
                  num_attention_heads=2, num_key_value_heads=1, vocab_size=32)  # fmt: skip
        (tmp_path / "good.json").write_text((tmp_path / "config.json").read_text())
    good = json.loads((tmp_path / "good.json").read_text())
    plans_or_refuses(tmp_path, good | changes)


@FUZZ
@given(config=JSON | damaged(VALID["awq"]))
def test_quantisation_configs_in_every_place(config: Any, tmp_path: Path) -> None:
    if not (tmp_path / "model.safetensors").exists():
        make_tiny_awq(tmp_path, tokenizer=False, num_hidden_layers=1)
        (tmp_path / "good.json").write_text((tmp_path / "config.json").read_text())
    good = json.loads((tmp_path / "good.json").read_text())
    plans_or_refuses(tmp_path, good | {"quantization_config": config})
    write_json(tmp_path / "quant_config.json", config)
    plans_or_refuses(tmp_path, {k: v for k, v in good.items() if k != "quantization_config"})
    (tmp_path / "quant_config.json").unlink()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")])
@pytest.mark.parametrize("file", ["config.json", "quant_config.json", "model.safetensors.index.json"])
def test_files_that_are_no_json_object(file: str, text: str | bytes, tmp_path: Path) -> None:
    make_tiny(tmp_path, tokenizer=False, num_hidden_layers=1)
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=file.replace(".", r"\.")):
        plan_folder(tmp_path)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads"]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_enormous_sizes_are_refused_at_once(field: str, model_type: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, tokenizer=False, num_hidden_layers=1)
    config = llama_config(num_hidden_layers=1, model_type=model_type) | {field: 10**11}
    config.pop("architectures")
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match=field):
        plan_folder(tmp_path)
