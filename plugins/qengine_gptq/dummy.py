"""Random GPTQ tensors that a writer could have made."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine.plugin import WEIGHT_STD, RandomTensors, TensorInfo
from qengine_gptq.layout import pack_columns
from qengine_gptq.zeros import ZeroRule


def dummy_tensors(
    tensors: Mapping[str, TensorInfo], bits: int, group_size: int, rule: ZeroRule, random: RandomTensors
) -> dict[str, torch.Tensor]:
    """Uniform codes of weights of WEIGHT_STD; every zero in the middle unless the config says that they differ; groups
    scattered over the inputs where there is a g_idx."""
    scale = WEIGHT_STD * 12**0.5 / (1 << bits)
    made = {}
    for leaf, info in tensors.items():
        if leaf == "scales":
            made[leaf] = random.uniform(info, 0.5 * scale, 1.5 * scale)
        elif leaf == "bias":
            made[leaf] = random.uniform(info, 0.0, 0.0)
        elif leaf == "g_idx":
            made[leaf] = (random.permutation(*info.shape) // group_size).to(torch.int32)
        elif leaf == "qzeros" and rule.symmetric is not False:
            middle = (1 << (bits - 1)) - (rule.stored == "gptq")
            groups, words = info.shape
            made[leaf] = pack_columns(torch.full((groups, words * 32 // bits), middle, device=random.device), bits)
        else:
            made[leaf] = random.bits(info)
    return made
