"""AutoGPTQ's and GPTQModel's files meet the logits of their references; read wrongly they don't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qengine_gptq.shards as shards
from checkpoint_logits import (
    assert_meets_reference,
    assert_misses_reference,
    checkpoint_root,
    folders,
    load_logits,
    meets_reference,
    reference_logits,
)
from qengine.errors import CheckpointError
from qengine.runtime.checkpoint import Checkpoint

ALL = folders("gptqmodel-", "autogptq-", "optimum-")


def settings(name: str) -> dict[str, Any]:
    root = checkpoint_root()
    assert root is not None
    config: dict[str, Any] = json.loads((root / name / "config.json").read_text())["quantization_config"]
    return config


def refused_field(name: str) -> str | None:
    """The words for what is not read here: GPTQModel's planar layout and its widths."""
    config = settings(name)
    form = config.get("checkpoint_format", config.get("format", "gptq"))
    if config["bits"] not in (2, 3, 4, 8):
        return f"bits {config['bits']} is not supported by gptq; need: 2"
    return None if form in ("gptq", "gptq_v2") else f"format {form!r} is not supported by gptq; need: gptq"


FOLDERS = [name for name in ALL if refused_field(name) is None]
TIGHT = 0.99999
"""The same arithmetic in float32: only the order of sums differs."""


@pytest.mark.parametrize("name", FOLDERS)
def test_meets_reference(name: str, checkpoints: Path) -> None:
    report = assert_meets_reference(checkpoints / name, TIGHT)
    quantised = [f for f in report.bytes_by_format if f.startswith("gptq ")]
    assert quantised
    if "sym" in name.split("-") and not name.startswith("optimum-"):  # optimum mislabels its zeros
        assert report.warnings == []


def test_other_layouts_are_refused_by_name(checkpoints: Path) -> None:
    for name in ALL:
        if field := refused_field(name):
            with pytest.raises(CheckpointError, match=field):
                load_logits(checkpoints / name)


def shifted_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """v1 for v2 or the other way round: every zero one off."""
    right = shards.read_zeros

    def wrong(words: torch.Tensor, bits: int, count: int, rule: object) -> tuple[torch.Tensor, None]:
        zeros, _ = right(words, bits, count, rule)  # type: ignore[arg-type]
        if zeros is None:
            zeros = torch.full((words.shape[0], count), 1 << (bits - 1), dtype=torch.uint8)
        return zeros - 1, None

    monkeypatch.setattr(shards, "read_zeros", wrong)
    monkeypatch.setattr(shards, "contradiction", lambda *_: None)


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


def asymmetric(name: str) -> bool:
    config = settings(name)
    return not config.get("sym", True) and config["bits"] <= 4


@pytest.mark.parametrize("name", [name for name in FOLDERS if asymmetric(name)])
def test_a_wrong_checkpoint_format_is_refused(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """Asymmetric zeros under the other convention's name: told from the weights' mean."""
    for file in (checkpoints / name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    own = config["quantization_config"]
    stored = own.get("checkpoint_format", own.get("format", "gptq"))
    other = "gptq" if stored == "gptq_v2" else "gptq_v2"
    own |= {"checkpoint_format": other, "format": other}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = f"more: qzeros read as {other}, .* checkpoint_format {stored} would work"
    with pytest.raises(CheckpointError, match=said) as e:
        load_logits(tmp_path)
    assert len(str(e.value)) < 1000


def plain(g_idx: torch.Tensor) -> torch.Tensor:
    """The map of groups that follow one another."""
    return torch.arange(len(g_idx), dtype=torch.int32) // (len(g_idx) // (int(g_idx.max()) + 1))


def shuffled(folder: Path) -> bool:
    """Told from the maps themselves: with static groups or one group, desc_act moves nothing."""
    checkpoint = Checkpoint.open(folder)
    maps = [checkpoint.read(name) for name in checkpoint.tensors if name.endswith(".g_idx")]
    return any(not torch.equal(g_idx.int(), plain(g_idx)) for g_idx in maps)


@pytest.mark.parametrize("name", FOLDERS)
def test_without_g_idx_act_order_misses_it(name: str, checkpoints: Path) -> None:
    """Read as if groups followed one another: wrong where inputs were reordered, and right everywhere else."""
    folder = checkpoints / name

    def sorted_maps(tensor: str, value: torch.Tensor) -> torch.Tensor:
        return plain(value) if tensor.endswith(".g_idx") else value

    got, _ = load_logits(folder, sorted_maps)
    assert (meets_reference(got, reference_logits(folder)) is None) == (not shuffled(folder))
