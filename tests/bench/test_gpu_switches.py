"""The benchmark of single features, run on a tiny shape on the CPU: each on and off, on the loads that it is about."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_switch_has_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("gpu_switches", FOLDER / "gpu_switches.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "out.json"
    script.main(["--shape", "tiny", "--device", "cpu", "--same-process", "--json", str(out)])
    rows = {r["row"]: r for r in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(script.ROWS)
    assert rows["pool fp8"]["kv_tokens"] > 1.9 * rows["pool 16-bit"]["kv_tokens"]
    given, _, new, count = script.SIZES["tiny"]["pool"]
    assert rows["pool 16-bit"]["kv_tokens"] == (given + new) * count // 2
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in printed[2:]] == ["one", "64", "one", "64", "shared", "pool"]
    failed = [{"row": "on", "error": "exit code 1"}, rows["eager"]]
    assert "exit code 1" in script.table(failed)[2]
