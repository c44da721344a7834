"""AutoAWQ's files meet the logits of their references; read wrongly they don't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_logits import assert_meets_reference, assert_misses_reference, folders

FOLDERS = folders("autoawq-", "llm-awq-")
TIGHT = 0.99999
"""The same arithmetic in float32: only the order of sums differs (and, in gemv_fast, a rounding of the zeros)."""


@pytest.mark.parametrize("name", FOLDERS)
def test_meets_reference(name: str, checkpoints: Path) -> None:
    report = assert_meets_reference(checkpoints / name, TIGHT)
    (label,) = [label for label in report.bytes_by_format if label.startswith("awq 4-bit")]
    assert report.warnings == []
    stated = json.loads((checkpoints / name / "config.json").read_text())["quantization_config"]["version"].lower()
    for kind in ("gemv", "gemv_fast", "marlin"):
        assert (kind in label.split()) == (kind == stated)


def other_nibbles(name: str, value: torch.Tensor) -> torch.Tensor:
    """The codes of each word in another order: what the wrong dialect gives."""
    if not name.endswith(".qweight"):
        return value
    codes = torch.stack([(value >> (4 * i)) & 15 for i in range(value.element_size() * 2)])
    codes = codes[[0, 2, 1, 3]] if len(codes) == 4 else codes[[0, 2, 4, 6, 1, 3, 5, 7]]
    out = torch.zeros_like(value)
    for i, nibble in enumerate(codes):
        out |= nibble << (4 * i)
    return out


def shifted_codes(name: str, value: torch.Tensor) -> torch.Tensor:
    """Every code one off, as if zeros were stored minus one."""
    if not name.endswith(".qweight"):
        return value
    out = torch.zeros_like(value)
    for i in range(value.element_size() * 2):
        out |= (((value >> (4 * i)) - 1) & 15) << (4 * i)
    return out


@pytest.mark.parametrize("misread", [other_nibbles, shifted_codes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FOLDERS)
def test_wrong_readings_miss_it(
    name: str, misread: Callable[[str, torch.Tensor], torch.Tensor], checkpoints: Path
) -> None:
    assert_misses_reference(checkpoints / name, misread)
