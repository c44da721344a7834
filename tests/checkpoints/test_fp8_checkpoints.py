"""AutoFP8's, transformers' and ModelOpt's FP8 files meet the logits of their references; read wrongly they don't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_logits import assert_meets_reference, assert_misses_reference, folders, meets_reference
from gpu_logits import gpu_info, gpu_logits
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine_kernels.testing import readable_id

FOLDERS = folders("autofp8-", "transformers-fp8-", "modelopt-fp8")
OTHER_ALGOS = [name for name in folders("modelopt-") if name not in FOLDERS]
TIGHT = 0.99999
"""The same arithmetic in float32: only the order of sums differs."""
ROUNDED = 0.98
"""Least cosine of a model with rounded activations to another implementation of the same."""


@pytest.mark.parametrize("name", FOLDERS)
def test_meets_reference(name: str, checkpoints: Path) -> None:
    report = assert_meets_reference(checkpoints / name, TIGHT)
    (label,) = [label for label in report.bytes_by_format if label.startswith("fp8 ")]
    assert ("static" in label) == ("static" in name or "modelopt" in name)
    assert all(kernel.startswith("weight-only FP8") for kernel in report.kernels if "FP8" in kernel)


def is_scale(name: str) -> bool:
    return name.endswith((".weight_scale", ".weight_scale_inv"))


def inverted(name: str, value: torch.Tensor) -> torch.Tensor:
    """What the name weight_scale_inv seems to say."""
    return (1 / value.float()).to(value.dtype) if is_scale(name) else value


def left_out(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(value) if is_scale(name) else value


def shifted(name: str, value: torch.Tensor) -> torch.Tensor:
    """Codes one off: e4m3fnuz's meaning of the same bits, which is half the value, for half of the codes."""
    if value.dtype is not torch.float8_e4m3fn:
        return value
    codes = value.view(torch.uint8)
    return torch.where((codes & 0x7F) > 0x38, codes - 8, codes).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("misread", [inverted, left_out, shifted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FOLDERS)
def test_wrong_readings_miss_it(
    name: str, misread: Callable[[str, torch.Tensor], torch.Tensor], checkpoints: Path
) -> None:
    assert_misses_reference(checkpoints / name, misread)


def test_other_algorithms_of_modelopt_are_refused_by_name(checkpoints: Path) -> None:
    for name in OTHER_ALGOS:
        with pytest.raises(CheckpointError, match=r"quant_algo '.*' is not supported by modelopt; need: FP8"):
            plan_folder(checkpoints / name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=readable_id)
@pytest.mark.parametrize("name", FOLDERS)
def test_on_a_gpu(name: str, dtype: torch.dtype, checkpoints: Path) -> None:
    """Weight-only as on an older GPU meets the reference; rounded activations come near the tool's own forward, which
    rounds them too, where there is one."""
    held = load_file(checkpoints / name / "reference.safetensors")
    sequences = held["input_ids"].tolist()
    got, _, _ = gpu_logits(checkpoints / name, sequences, dtype, info=gpu_info((8, 6)))
    assert meets_reference(torch.stack(got), held["logits"]) is None
    got, _, report = gpu_logits(checkpoints / name, sequences, dtype)
    assert any("FP8 GEMM, activations rounded" in kernel for kernel in report.kernels)
    rounded = held.get("logits_tool", held["logits"])
    assert torch.cosine_similarity(torch.stack(got), rounded.float(), dim=-1).min() > ROUNDED
