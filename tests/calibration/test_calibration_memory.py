"""What a run takes: as planned, the same for little and much text, and within --max-memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qengine.errors import CapacityError
from qengine.runtime import device as devices
from qengine.runtime.checkpoint import Checkpoint
from qengine_calibration.hidden import HiddenFile
from qengine_calibration.make import make_copy, weights_option
from qengine_calibration.run import CalibrationRun, RunOptions
from qengine_calibration.texts import Texts
from toy_models import VOCAB, make_tiny

LENGTH = 64


def texts(samples: int) -> Texts:
    ids = torch.randint(0, VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(3)).tolist()
    return Texts(ids, LENGTH, "random ids", 1, 1, f"{samples}")


def options(max_memory: int | None = None, tokens_at_once: int = 1024) -> RunOptions:
    weights = weights_option("awq", group_size=64)
    return RunOptions(weights, device="cpu", max_memory=max_memory, tokens_at_once=tokens_at_once)


def peak_of(work: Callable[[], object]) -> int:
    """Bytes by which the process's largest resident set grows (Linux can forget an earlier one)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    work()
    return resident("VmHWM") - before


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_peak_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False, num_hidden_layers=1)
    names = iter("abcdef")

    def calibrate(samples: int) -> int:
        return peak_of(lambda: make_copy(source, tmp_path / next(names), texts(samples), options()))

    calibrate(32)  # what libraries allocate once
    few, many = calibrate(32), calibrate(512)
    hidden = 512 * LENGTH * 256 * 4
    assert abs(many - few) < 0.05 * resident("VmRSS") and many - few < hidden / 2

    # Wrong control: hidden states that stay in memory.
    kept: list[torch.Tensor] = []
    write = HiddenFile.write
    monkeypatch.setattr(HiddenFile, "write", lambda self, first, rows: (kept.append(rows), write(self, first, rows)))
    assert calibrate(512) - few > hidden


def test_max_memory_makes_micro_batches_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "allocated", lambda device: 300 << 20)
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "source", tokenizer=False))

    def run(most: int | None, tokens: int = 4096) -> CalibrationRun:
        return CalibrationRun(checkpoint, texts(64), options(most, tokens), tmp_path / "work", "mark")

    free = run(None)
    assert free.memory.tokens == free.stream.tokens_at_once == 4096
    assert any("whatever the amount of text: about" in line for line in free.plan())
    room = free.memory.base + free.memory.layer + 200 * free.memory.token
    small = run(room)
    assert small.memory.tokens == small.stream.tokens_at_once == 192 and small.memory.peak <= room
    with pytest.raises(CapacityError, match=r"one layer and one sequence of 64 tokens do not fit; have: 100 MiB; need"):
        run(100 << 20)
    assert run(None, 128).memory.peak < free.memory.peak


def test_figures_are_reported(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False)
    facts = make_copy(source, tmp_path / "copy", texts(8), options())
    assert facts["memory"]["tokens_at_once"] == 512 and facts["memory"]["peak"] >= facts["memory"]["planned"] * 0.5
