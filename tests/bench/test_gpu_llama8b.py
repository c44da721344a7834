"""The benchmark of the 8B shape, run on a tiny one on the CPU: every row, every figure, the comparison beside it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_llama8b.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_llama8b", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, tmp_path: Path, *argv: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    script.main(["--shape", "tiny", "--device", "cpu", "--json", str(out), *argv])
    return dict(json.loads(out.read_text()))


def test_every_row_has_every_figure(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(script, tmp_path, "--same-process")
    assert [r["row"] for r in found["rows"]] == list(script.ROWS)
    for r in found["rows"]:
        assert all(r[name] > 0 for name in ("ready_s", *script.FIGURES)), r
        assert r["output"] < r["decode"] and r["kernels_compiled"] == 0
    tokens = {r["row"]: r["kv_tokens"] for r in found["rows"]}
    assert tokens["awq+fp8"] > 1.9 * tokens["awq+auto"]
    printed = capsys.readouterr()
    assert printed.out.count("\n| ") == 1 + len(script.ROWS) and "goal 11,500" in printed.out
    report = printed.err
    assert all(f"weights: {name}" in report or name in report for name in ("awq", "gptq", "fp8"))


def test_a_row_in_a_process_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    argv = ("--rows", "gptq+fp8", "--parts", "latency", "--set", "async_scheduling=true")
    [row] = run(script, tmp_path, *argv)["rows"]
    assert row["ms_per_token"] > 0 and "output" not in row and row["options"]["async_scheduling"] is True
    assert row["ready_s"] > row["engine_ready_s"]


def test_what_fails_is_a_row_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    [row] = run(script, tmp_path, "--rows", "awq+auto", "--set", "block_size=3")["rows"]
    assert "exit code" in row["error"]


def test_figures_behind_the_peers_are_marked(script: ModuleType) -> None:
    row = {"row": "awq+fp8", "ready_s": 1.0, "output": 9000, "ms_per_token": 2.0}
    line = script.table([row])[-1]
    assert "9,000! (9,866; goal 11,500)" in line and "2.00 (4.04; goal 1.90)" in line
    with pytest.raises(SystemExit):
        script.parse(["--rows", "int4+auto"])
