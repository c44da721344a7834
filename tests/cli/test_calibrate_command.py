"""`qengine calibrate`: what it refuses before any work, and a run from the command line to a served model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qengine.cli.main import main
from toy_engine import request, run, toy_engine
from toy_models import make_tiny


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m"], "nothing to calibrate; need: --quant NAME, --kv-dtype NAME, or both"),
        (["m", "--quant", "awq"], "need: --out FOLDER"),
        (["m", "--quant", "awq", "--out", "x", "--embed"], "--embed is about KV scales"),
        (["m", "--kv-dtype", "fp8", "--method", "guess"], "unknown value 'guess'"),
        (["m", "--kv-dtype", "fp8", "--seq-len", "4"], "--seq-len is too short"),
        (["m", "--quant", "nope", "--out", "x"], "nope"),
    ],
)
def test_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_from_text_to_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_tiny(tmp_path / "source", dtype="float16")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {i} " * 20}) + "\n" for i in range(10)))
    common = ["--data", str(data), "--seq-len", "64", "--device", "cpu", "-q"]
    out = tmp_path / "copy"
    argv = ["calibrate", str(source), "--quant", "awq", "--kv-dtype", "fp8", "--out", str(out), *common]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(out)
    assert "10 of 10 rows used" in printed.err and "14 linears: relative output error" in printed.err
    assert "KV cache: relative attention-output error" in printed.err
    figures = json.loads((out / "calibration.json").read_text())
    assert figures["weights"] == {"format": "awq", "options": {"group_size": 128}} and len(figures["linears"]) == 14
    engine = toy_engine(out, kv_cache_dtype="fp8")
    report = "\n".join(engine.facts.report)
    assert "calibration file" in report and "without scales" not in report and "awq" in report
    assert len(run(engine, [request("a", [1, 2, 3], max_tokens=4)]).ids["a"]) == 4
    assert main(argv) == 2 and "is there already" in capsys.readouterr().err


def test_kv_scales_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_tiny(tmp_path / "source")
    (tmp_path / "t.txt").write_text("some text " * 60)
    argv = ["calibrate", str(source), "--kv-dtype", "fp8_e5m2", "--kv-granularity", "tensor", "-q", "--device", "cpu"]
    assert main([*argv, "--data", str(tmp_path / "t.txt")]) == 0
    assert capsys.readouterr().out.strip() == str(source)
    facts = json.loads((source / "kv_scales.json").read_text())
    assert (facts["kv_dtype"], facts["granularity"], facts["method"]) == ("fp8_e5m2", "tensor", "output")
    assert facts["text"]["tokens"] == 600 and len(facts["layers"]) == 2
    assert not list(source.glob(".*"))
