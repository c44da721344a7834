"""Which configs of quant_method fp8 and modelopt are read, and which are refused by field and value."""

from __future__ import annotations

from typing import Any

import pytest

from qengine_fp8.backend import Fp8Quant
from qengine_fp8.config import Fp8Config, read_config, read_modelopt
from qengine_fp8.modelopt import ModelOptQuant

AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
DEEPSEEK = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}  # fmt: skip
TRANSFORMERS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None,
    "modules_to_not_convert": ["lm_head"], "dequantize": False,
}  # fmt: skip


def test_the_writers_configs() -> None:
    assert read_config(AUTOFP8) == Fp8Config(None, True, ("lm_head",))
    assert read_config(AUTOFP8 | {"activation_scheme": "dynamic", "kv_cache_scheme": "static"}).static is False
    assert read_config(DEEPSEEK) == Fp8Config((128, 128), False)
    assert read_config(TRANSFORMERS) == Fp8Config(None, False, ("lm_head",))
    both = read_config({"ignored_layers": ["a"], "modules_to_not_convert": ["b", "a"]})
    assert both.skipped == ("a", "b") and both.static is None
    gptqmodel = {"method": "fp8", "format": "float8_e4m3fn", "meta": {"quantizer": ["gptqmodel:7.6.0"]}}
    assert read_config(gptqmodel).divides and not read_config(DEEPSEEK).divides
    assert read_config({"weight_scale_semantics": "inverse"}).divides
    assert read_config(None).at_load and not read_config({}).at_load


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fmt": "e4m3fnuz"}, "fmt 'e4m3fnuz'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"format": "float8_e5m2"}, "format 'float8_e5m2'"),
        ({"checkpoint_format": "float8_e8m0fnu"}, "checkpoint_format 'float8_e8m0fnu'"),
        ({"weight_scale_semantics": "direct"}, "weight_scale_semantics 'direct'"),
        ({"activation_scheme": "per_token"}, "activation_scheme 'per_token'"),
        ({"scale_fmt": "ue4m3"}, "scale_fmt 'ue4m3'"),
        ({"weight_block_size": 128}, "weight_block_size 128"),
        ({"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        ({"weight_block_size": [128, True]}, r"weight_block_size \[128, True\]"),
        ({"weight_block_size": [128, 100]}, r"weight_block_size \[128, 100\] is not supported; need: a multiple of 32"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"bits": 4}, "bits 4 is not supported by fp8; need: 8"),
        ({"weight_scale_method": "column"}, r"weight_scale_method 'column' .* need: tensor \| row \| block"),
        ({"dynamic": ["a"]}, r"dynamic \['a'\]"),
        ({"dynamic": {"(": {}}}, r"dynamic '\(' is no regular expression"),
        ({"dynamic": {"+:.*up": {"format": "float8_e5m2"}}}, r"dynamic '\+:\.\*up': format 'float8_e5m2'"),
        ({"dynamic": {"a": {"weight_block_size": [1]}}}, r"dynamic 'a': weight_block_size \[1\]"),
        ({"dynamic": {"a": {"weight_scale_semantics": "direct"}}}, "dynamic 'a': weight_scale_semantics 'direct'"),
        ({"ignored_layers": "lm_head"}, "ignored_layers 'lm_head'"),
        ({"modules_to_not_convert": [1]}, r"modules_to_not_convert \[1\]"),
    ],
)
def test_refused_by_field_and_value(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Fp8Quant.parse({"quant_method": "fp8", **change})


RULES = {
    "model.layers.0.mlp.up_proj": True,
    "layers.0.mlp.up_proj": True,
    "up_proj": True,
    "model.layers.0": True,
    "layers.0": True,
    "model.layers.0.*": True,
    "*.up_proj": True,
    "model.layers.*.mlp.*": True,
    "proj": False,
    "model.layers.0.mlp.up": False,
    "model.layers.1": False,
    "layers.0.mlp.gate_proj": False,
    "*.gate_proj": False,
}


@pytest.mark.parametrize("rule", RULES)
def test_skip_lists_in_every_spelling(rule: str) -> None:
    name = "model.layers.0.mlp.up_proj"
    assert Fp8Config(skipped=("other", rule)).skip_rule(name) == (rule if RULES[rule] else None)
    bare = name.removeprefix("model.")
    assert (Fp8Config(skipped=(rule,)).skip_rule(bare) is not None) is RULES[rule]


def test_modelopts_two_homes() -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0*"]}
    nested = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": inner}
    assert read_modelopt(nested).skipped == ("lm_head", "model.layers.0*")
    flat = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "config_groups": {"group_0": {}}}
    assert read_modelopt(flat) == Fp8Config(skipped=("lm_head",))
    assert not read_modelopt(None).at_load


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_AWQ", "W4A8_AWQ", "MXFP8", "MIXED_PRECISION", None, 8])
def test_modelopts_other_algorithms(algo: Any) -> None:
    for config in ({"quant_method": "modelopt", "quant_algo": algo}, {"quantization": {"quant_algo": algo}}):
        with pytest.raises(ValueError, match=f"quant_algo {algo!r} is not supported by modelopt; need: FP8"):
            ModelOptQuant.parse(config)


def test_what_can_be_made() -> None:
    assert Fp8Quant.quantizer() is not None and Fp8Quant.quantizes_at_load
    assert ModelOptQuant.quantizer() is None and not ModelOptQuant.quantizes_at_load
