"""AutoGPTQ's and GPTQModel's files meet the logits of their references; read wrongly they don't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qengine_gptq.shards as shards
from checkpoint_logits import (
    assert_meets_reference,
    assert_misses_reference,
    folders,
    load_logits,
    meets_reference,
    reference_logits,
)

FOLDERS = folders("gptqmodel-", "autogptq-", "optimum-")
TIGHT = 0.99999
"""The same arithmetic in float32: only the order of sums differs."""


@pytest.mark.parametrize("name", FOLDERS)
def test_meets_reference(name: str, checkpoints: Path) -> None:
    report = assert_meets_reference(checkpoints / name, TIGHT)
    quantised = [f for f in report.bytes_by_format if f.startswith("gptq ")]
    assert quantised
    if "sym" in name.split("-"):
        assert report.warnings == []


def shifted_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """v1 for v2 or the other way round: every zero one off."""
    right = shards.read_zeros

    def wrong(words: torch.Tensor, bits: int, count: int, rule: object) -> tuple[torch.Tensor, None]:
        zeros, _ = right(words, bits, count, rule)  # type: ignore[arg-type]
        if zeros is None:
            zeros = torch.full((words.shape[0], count), 1 << (bits - 1), dtype=torch.uint8)
        return zeros - 1, None

    monkeypatch.setattr(shards, "read_zeros", wrong)


def reversed_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of a word from the high end on: another format's order."""
    right = shards.unpack

    def wrong(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
        slots = 32 if bits == 3 else 32 // bits
        return right(words, bits, count).unflatten(0, (-1, slots)).flip(1).flatten(0, 1)

    monkeypatch.setattr(shards, "unpack", wrong)


@pytest.mark.parametrize("misread", [shifted_zeros, reversed_codes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FOLDERS)
def test_wrong_readings_miss_it(
    name: str, misread: Callable[[pytest.MonkeyPatch], None], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misread(monkeypatch)
    assert_misses_reference(checkpoints / name)


def shuffled(folder: Path) -> bool:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    return bool(settings.get("desc_act")) and not settings.get("static_groups")


@pytest.mark.parametrize("name", FOLDERS)
def test_without_g_idx_act_order_misses_it(name: str, checkpoints: Path) -> None:
    """Read as if groups followed one another: wrong where inputs were reordered, and right everywhere else."""
    folder = checkpoints / name

    def plain(tensor: str, value: torch.Tensor) -> torch.Tensor:
        if not tensor.endswith(".g_idx"):
            return value
        return torch.arange(len(value), dtype=torch.int32) // (len(value) // (int(value.max()) + 1))

    got, _ = load_logits(folder, plain)
    assert (meets_reference(got, reference_logits(folder)) is None) == (not shuffled(folder))
