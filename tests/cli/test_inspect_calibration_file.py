"""`qengine inspect` of a model with a calibration file: its faults are said beside those of the model, not instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qengine.cli.main import main
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.kv_beside import own_folder
from qengine.runtime.kv_sidecar import FACTS, model_fingerprint, write_sidecar
from toy_models import make_tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


def write(model: Path, folder: Path, kv_dtype: str = "fp8_e4m3") -> None:
    tensors = {f"model.layers.{i}.self_attn.{side}_scale": torch.tensor([0.5]) for i in (0, 1) for side in "kv"}
    facts = {"kv_dtype": kv_dtype, "method": "amax", "granularity": "tensor", "text": {"tokens": 1}}
    write_sidecar(folder, model_fingerprint(Checkpoint.open(model)), tensors, facts)


def inspect(capsys: Capture, folder: Path, *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["inspect", "--json", str(folder), "--device", "cpu", *argv]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def edit_config(folder: Path, **change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))


def test_an_edited_model_with_a_stale_file(folder: Path, capsys: Capture) -> None:
    write(folder, folder)
    edit_config(folder, intermediate_size=640)
    found = inspect(capsys, folder, "--kv-dtype", "fp8", code=1)
    assert "made for another model" in found["problems"][0]
    assert any("mlp" in line for line in found["problems"][1:]) and found["wrong"]
    # auto needs no scales: the mismatch alone is a problem.
    found = inspect(capsys, folder, code=1)
    assert found["problems"] and not any("kv_scales" in line for line in found["problems"])
    assert any("passed over" in note and "made for another model" in note for note in found["kv_notes"])


def test_auto_is_servable_without_the_facts(folder: Path, capsys: Capture) -> None:
    write(folder, folder)
    assert list(inspect(capsys, folder)["kv_scales"]) == [f"calibration file {folder}/kv_scales.safetensors "
                                                          "(amax, per tensor, 1 tokens)"]  # fmt: skip
    (folder / FACTS).unlink()
    found = inspect(capsys, folder)
    assert not found["problems"] and "KV dtype auto needs none" in found["kv_notes"][0]
    assert "--kv-dtype fp8_e4m3 is refused" in found["kv_notes"][1]
    assert "holds no kv_scales.json" in inspect(capsys, folder, "--kv-dtype", "fp8", code=1)["problems"][0]


def test_what_serving_measured_is_shown(folder: Path, capsys: Capture) -> None:
    write(folder, own_folder(folder, "fp8"))
    for argv in ((), ("--kv-dtype", "fp8")):
        assert "kv_scales/fp8_e4m3/kv_scales.safetensors" in next(iter(inspect(capsys, folder, *argv)["kv_scales"]))
    assert list(inspect(capsys, folder, "--kv-dtype", "fp8_e5m2")["kv_scales"]) == ["default 1.0"]


def test_a_place_that_is_none(folder: Path, capsys: Capture) -> None:
    (line,) = inspect(capsys, folder, "--kv-scales", "word", "--kv-dtype", "fp8", code=1)["problems"]
    assert line.startswith("--kv-scales word; have: no such path; need: a folder with kv_scales.safetensors and")
    assert "what would work: the folder that `qengine calibrate" in line
