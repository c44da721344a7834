"""`qengine inspect` on toy checkpoints: what it prints, and that it refuses what `serve` would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qengine.cli.main import main
from toy_models import make_tiny, make_tiny_awq


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["inspect", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_dense_model_and_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path)
    args = (str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "1M")
    lines = lines_of(capsys, *args)
    assert lines[0] == f"Model: {tmp_path}"
    # 2 layers, K and V, 2 heads of 64 values, 4 bytes each.
    assert "KV cache: auto, 2,048 bytes for one token" in lines
    assert "KV cache: fp8_e4m3, 512 bytes for one token" in lines_of(capsys, *args, "--kv-dtype", "fp8")
    for start in ("Linears: 15 x ", "Memory plan: ", "KV cache size: "):
        assert any(line.startswith(start) for line in lines)


def test_awq_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_awq(tmp_path)
    lines = lines_of(capsys, str(tmp_path), "--device", "cpu")
    linears = next(line for line in lines if line.startswith("Linears: "))
    assert linears.startswith("Linears: 14 x awq 4-bit") and "1 x " in linears


def test_missing_tensor_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("qengine: error: ") and err.count("\n") == 1
    assert "model.layers.1.mlp.down_proj.weight" in err


@pytest.mark.parametrize("argv", [[], ["no/such/folder/here"]])
def test_no_model(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *argv]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("qengine: error: ")
