"""What llm-compressor writes, in every scheme of it that qengine reads, against compressed-tensors' own decompression.

Runs where llmcompressor is installed: `.ci/ecosystem llmcompressor`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from load_model import load_folder
from qengine.errors import CheckpointError
from torch_kv import PagedRun
from toy_models import make_tiny, write_model
from toy_moe import make_moe

IDS = [[72, 101, 108, 108, 111, 256, 3, 200], [9, 8, 7, 6, 5, 4, 3, 2]]
INT: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN: dict[str, Any] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def one(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"]}


def preset(name: str) -> dict[str, Any]:
    return {"scheme": name, "targets": ["Linear"], "ignore": ["lm_head", "re:.*gate$"]}


SCHEMES: dict[str, dict[str, Any]] = {
    **{name: preset(name) for name in ("W4A16", "W4A16_ASYM", "W8A16", "W3A16", "FP8_DYNAMIC", "FP8_BLOCK")},
    "w4-g64-asym": one(INT | {"symmetric": False}),
    "w4-channel": one(INT | {"strategy": "channel", "group_size": None}),
    "w4-tensor": one(INT | {"strategy": "tensor", "group_size": None}),
    "w8-asym": one(INT | {"num_bits": 8, "symmetric": False}),
    "w6": one(INT | {"num_bits": 6}),
    "fp8-weights-only": one(FLOAT | {"strategy": "tensor"}),
    "fp8-token": one(FLOAT, TOKEN | {"type": "float"}),
    "w8a8": preset("W8A8"),
}
FAMILIES = {"llama": make_tiny, "mixtral": partial(make_moe, intermediate_size=128)}
CASES = [("llama", name) for name in SCHEMES] + [("mixtral", name) for name in ("w4-g64-asym", "FP8_DYNAMIC", "w8a8")]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def dense(folder: Path) -> dict[str, torch.Tensor]:
    """float32 weights by name, each module decompressed by the compressor that its format names."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(without(config, "sparsity_config", "transform_config"))
    (scheme,) = parsed.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    out = {}
    for module, own in modules.items():
        if "weight_scale" in own:
            own = compressor.decompress(own, scheme)
        out |= {f"{module}.{leaf}": own[leaf].float() for leaf in ("weight", "bias") if leaf in own}
    return out


def logits(folder: Path) -> torch.Tensor:
    return torch.stack(PagedRun(load_folder(folder), IDS).run())


@pytest.mark.parametrize("family, name", CASES)
def test_both_mean_the_same(family: str, name: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path / "base", tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"), dtype=torch.bfloat16)
    oneshot(model=model, recipe=QuantizationModifier(**SCHEMES[name]), pipeline="datafree")
    made = tmp_path / "made"
    model.save_pretrained(str(made), save_compressed=True)

    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    meaning = write_model(tmp_path / "dense", without(config, "quantization_config"), dense(made))
    got, want = logits(made), logits(meaning)
    # Of W8A8, activations are rounded too, in mixtures of experts also what the router sees.
    least = 0.9 if name == "w8a8" else 0.99999
    assert torch.cosine_similarity(got, want, dim=-1).min() > least
    away = torch.cosine_similarity(got, logits(tmp_path / "base"), dim=-1).min()
    assert away < 0.9999, "control: nothing was quantised"


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16", "MXFP8A16"])
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    make_tiny(tmp_path / "base", tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"), dtype=torch.bfloat16)
    oneshot(model=model, recipe=QuantizationModifier(**preset(name)), pipeline="datafree")
    model.save_pretrained(str(tmp_path / "made"), save_compressed=True)
    with pytest.raises(CheckpointError, match=name.removesuffix("A16")):
        load_folder(tmp_path / "made")
