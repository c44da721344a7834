"""`qengine tune` and `qengine bench kernels` from the command line, and what a start makes of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qengine.bench.options import numbers_of, pairs_of
from qengine.bench.tiles import tiled_shapes
from qengine.cli.main import main
from qengine.errors import ConfigError
from qengine.runtime.tile_tables import table_path, take_table
from qengine_kernels.launch import INTERPRETER, Chip
from qengine_kernels.wna16_gemm.tile_table import save


@pytest.mark.parametrize("command", [["tune", "--shapes", "128x256"], ["bench", "kernels"]], ids=["tune", "kernels"])
def test_without_a_gpu_there_is_one_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    assert main(command) == 2
    assert "measured on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["tune", "--shapes", "128"], "--shapes is a list of pairs"),
        (["tune", "--rows", "8,0"], "--rows is a list of positive numbers"),
        (["tune", "--rows", "1K"], "without units"),
        (["bench", "kernels", "--shapes", "0x4096"], "such as 6144x4096"),
        (["bench", "kernels", "--decodes", "1x" + "9" * 5000], "such as 64x8192"),
        (["tune", "--group-size", "8"], "--group-size is too small"),
        (["bench", "kernels", "--heads", "32x8"], "--heads is three positive numbers"),
        (["bench", "kernels", "--decodes", "1x2x3"], "--decodes is a list of pairs"),
    ],
)
def test_bad_values_are_named(command: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert error in capsys.readouterr().err


def test_numbers_and_shapes() -> None:
    assert numbers_of("--rows", "1,16") == [1, 16]
    assert pairs_of("1x2,3x4") == [(1, 2), (3, 4)] and pairs_of("none") == pairs_of(None) == []
    assert tiled_shapes([(64, 128), (100, 128), (64, 128), (128, 64)], 128) == [(64, 128, 0), (128, 64, 0)]
    with pytest.raises(ConfigError, match="no linear of these shapes has tiles"):
        tiled_shapes([(100, 128)], 128)


def test_a_start_takes_this_gpus_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chip.of a CPU is the interpreter's, which stands in for a GPU here."""
    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path))
    tables: dict[object, object] = {}
    monkeypatch.setattr("qengine_kernels.wna16_gemm.tile_table.TUNED", tables)
    cpu, gpu = torch.device("cpu"), "NVIDIA H200 (141 GB)"
    assert "built in" in take_table(cpu, gpu) and not tables
    path = table_path(gpu)
    assert path == tmp_path / "tiles" / "nvidia-h200-141-gb.json"
    save(path, INTERPRETER, {(64, 64, 0): []}, {"device": gpu})
    assert str(path) in take_table(cpu, gpu) and list(tables) == [(INTERPRETER, 64, 64, 0)]
    save(path, Chip.known(80), {}, {})
    with pytest.raises(ConfigError, match="another chip"):
        take_table(cpu, gpu)
