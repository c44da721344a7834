"""Random tensors of one linear, for `--load-format dummy` and the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qengine.plugin import E4M3_MAX, E4M3_STD, WEIGHT_STD, LinearSpec, RandomTensors, TensorInfo
from qengine_compressed_tensors.integers import IntFormat

USUAL_LARGEST = 8.0
"""Activations behind a norm rarely exceed it: that is what static scales stand for."""


def dummy_tensors(
    spec: LinearSpec, tensors: Mapping[str, TensorInfo], integers: IntFormat | None, random: RandomTensors
) -> dict[str, torch.Tensor]:
    """Values for the headers in `tensors`. `integers` None: e4m3 weights; else uniform codes, whose scales give weights
    of WEIGHT_STD."""
    if integers is None:
        scale, largest = WEIGHT_STD / E4M3_STD, E4M3_MAX
    else:
        spread = (1 << integers.bits) / 12**0.5 * (1.0 if integers.zeros is None else 2**0.5)
        scale, largest = WEIGHT_STD / spread, 127.0
    made = {}
    for leaf, info in tensors.items():
        if leaf == "weight_scale":
            made[leaf] = random.uniform(info, 0.5 * scale, 1.5 * scale)
        elif leaf == "input_scale":
            made[leaf] = random.uniform(info, USUAL_LARGEST / largest, USUAL_LARGEST / largest)
        elif leaf == "weight_g_idx":
            assert integers is not None
            made[leaf] = (random.permutation(spec.in_features) // integers.group_size).to(torch.int32)
        elif info.dtype == "F8_E4M3":
            made[leaf] = random.e4m3(info)
        elif info.dtype == "I8":
            assert integers is not None
            made[leaf] = random.bits(info) >> (8 - integers.bits)  # one value a byte, in fewer bits
        elif info.dtype == "I32":
            made[leaf] = random.bits(info)
        else:
            made[leaf] = random.uniform(info, 0.0, 0.0)  # the bias
    return made


def sample_configs() -> list[dict[str, Any]]:
    """Configs of the layouts that llm-compressor writes, one of each."""
    tokens = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    integers, floats = ({"type": kind} for kind in ("int", "float"))
    group = {"strategy": "group", "group_size": 32}
    rows = {"strategy": "channel"}
    return [
        _config("pack-quantized", integers | group | {"num_bits": 4}),
        _config("pack-quantized", integers | group | {"num_bits": 4, "symmetric": False}),
        _config("pack-quantized", integers | group | {"num_bits": 4, "actorder": "group"}),
        _config("pack-quantized", integers | rows | {"num_bits": 8}),
        _config("int-quantized", integers | rows | {"num_bits": 8}, tokens | integers),
        _config("float-quantized", floats | rows | {"num_bits": 8}, tokens | floats),
        _config("float-quantized", floats | {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
    ]


def _config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    args = {"symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
