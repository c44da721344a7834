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
        (["m", "--quant", "awq", "--out", "x", "--embed"], "--embed: nothing to make of that kind (KV cache)"),
        (["m", "--quant", "awq", "--out", "x", "--method", "amax"], "need: --kv-dtype NAME"),
        (["m", "--kv-dtype", "fp8", "--bits", "4", "--damping", "0.1"], "--bits and --damping: nothing to make"),
        (["m", "--kv-dtype", "fp8", "--method", "guess"], "unknown value 'guess'"),
        (["m", "--kv-dtype", "fp8", "--seq-len", "4"], "--seq-len is too short"),
        (["m", "--quant", "nope", "--out", "x"], "nope"),
    ],
)
def test_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--quant", "awq", "--act-order"], "awq has no --act-order"),
        (["--quant", "gptq", "--zero-point"], "gptq has no --zero-point"),
        (["--quant", "fp8", "--bits", "4"], "fp8 has no --bits"),
        (["--quant", "gptq", "--bits", "5"], "bits 5 is not supported by gptq; need: 2 | 3 | 4 | 8"),
        (["--quant", "awq", "--group-size", "48"], "no linear of this model can be quantised like that; have: 2"),
        (["--quant", "gptq", "--group-size", "100"], "inputs are no multiple of group size 100 (12 linears)"),
        (["--quant", "awq", "--out", "{tiny}/config.json/x"], "config.json cannot be written"),
        (["--kv-dtype", "fp8", "--out", "{tiny}/config.json"], "KV scales cannot be written into"),
    ],
)
def test_what_a_model_or_format_does_not_take(
    argv: list[str], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("some text " * 60)
    out = ["--out", str(tmp_path / "out")] if "--out" not in argv else []
    asked = [a.format(tiny=tiny) for a in argv]
    run_as = ["calibrate", str(tiny), *asked, *out, "--data", str(tmp_path / "t.txt"), "-q", "--device", "cpu"]
    assert main([*run_as, "--eval-tokens", "0"]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1] and "QENGINE_CACHE" not in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


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
