"""The offload benchmark on tiny shapes on the CPU, where nothing can be offloaded: every figure of a row."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "offload.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("offload_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, names = tmp_path / "out.json", ["llama-3.1-8b-bf16", "qwen3-30b-a3b-awq"]
    argv = ["--shape", "tiny", "--device", "cpu", "--tokens", "6", "--same-process", "--json", str(out)]
    script.main([*argv, "--rows", ",".join(names)])
    rows = json.loads(out.read_text())["rows"]
    assert [r["row"] for r in rows] == names
    for r in rows:
        assert r["decode_1"] > 0 and r["decode_8"] > 0 and r["first_token_s"] > 0 and r["offloaded_bytes"] == 0
    assert capsys.readouterr().out.count("\n| ") == len(names)


def test_shares_of_the_ceiling_are_shown(script: ModuleType) -> None:
    row = {
        "row": "a", "offloaded_bytes": 3 << 30, "first_token_s": 20.0, "decode_1": 9.5, "decode_8": 74.0,
        "pinned_rate": 32.2e9, "ceiling_steps": 10.0, "share_1": 0.95, "share_8": 0.925, "kv_tokens": 4096,
        "peak_host": 4 << 30, "peak_device": 14 << 30, "apart_percent": 0.1,
    }  # fmt: skip
    line = script.table([row])[-1]
    assert "| 3.00 | 20.0 | 9.50 | 74.0 | 32.2 | 10.00 | 95% | 92% | 4,096 |" in line
    options = script.engine_options(script.parse(["--gib", "15"]), "qwen2.5-32b-awq", 140 << 30)
    assert options["cpu_offload_gb"] is None and options["gpu_memory_utilization"] == pytest.approx(14.75 / 140)
    assert script.decode_rate([type("T", (), {"times": [1.0, 2.0, 3.0]}), type("T", (), {"times": [2.0, 3.0]})]) == 2.0
    with pytest.raises(SystemExit):
        script.parse(["--rows", "gpt-2"])
