"""`qengine calibrate`: what it refuses before any work, and a run from the command line to a served model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qengine.cli.main import main
from qengine.errors import ConfigError
from qengine.text import Tokenizer
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_kv_scales
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import load_texts
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
        (["m", "--kv-dtype", "fp8", "--seq-len", "4"], "--seq-len is too small; have: 4; need: >= 16"),
        (["m", "--kv-dtype", "fp8", "--samples", "0"], "--samples is too small; have: 0; need: >= 1"),
        (["m", "--kv-dtype", "fp8", "--max-memory", "-4G"], "--max-memory is too small; have: -4294967296; need: >= 1"),
        (["m", "--kv-dtype", "fp8", "--eval-tokens", "-1"], "--eval-tokens is too small; have: -1; need: >= 128, or 0"),
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
        (["--quant", "awq", "--group-size", "48"], "no linear of this model can be quantised like that: have: 2"),
        (["--quant", "awq", "--group-size", "0"], "group_size 0 makes no sense; need: a positive number, or -1"),
        (["--quant", "gptq", "--damping", "nan"], "damping nan makes no sense; need: 0 < damping < 1"),
        (["--kv-dtype", "fp8", "--max-kv-damage", "0"], "--max-kv-damage is no limit; have: 0.0; need: 0 < x < inf"),
        (["--kv-dtype", "fp8", "--max-kv-damage", "inf"], "--max-kv-damage is no limit; have: inf"),
        (["--kv-dtype", "fp8", "--seq-len", "2049"], "have: 2049 tokens; need: at most 2048 tokens"),
        (["--kv-dtype", "fp8", "--samples", "3", "--seq-len", "64"], "have: 3; need: >= 4"),
        (["--kv-dtype", "fp8", "--max-memory", "1"], "--max-memory: one layer and one sequence of 512 tokens"),
        (["--kv-dtype", "fp8", "--data-field", "x"], "--data-field is for .jsonl and .parquet files; have: t.txt"),
        (["--quant", "gptq", "--group-size", "100"], "256 inputs; need: a multiple of group size 100 (12 linears)"),
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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "rows.jsonl", "source"]
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
    argv = ["eval", str(source), "--kv-scales", str(source), "--max-tokens", "200", "--quiet", "--device", "cpu"]
    assert main(argv) == 0
    assert "kv_scales.safetensors is not used: KV dtype auto takes no scales" in capsys.readouterr().out


def test_a_sequence_is_as_long_as_the_context_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """512 tokens are the default, but no model is calibrated beyond what it was made for."""
    short = make_tiny(tmp_path / "short", max_position_embeddings=96)
    argv = ["calibrate", str(short), "--kv-dtype", "fp8", "-q", "--device", "cpu", "--eval-tokens", "0"]
    assert main([*argv, "--samples", "3"]) == 0
    assert json.loads((short / "kv_scales.json").read_text())["text"]["length"] == 96
    assert main([*argv, "--seq-len", "97"]) == 2 and "need: at most 96 tokens" in capsys.readouterr().err
    assert main([*argv, "--data-field", "x"]) == 2
    assert "--data-field names a field of --data's rows; have: 'x' for the built-in texts" in capsys.readouterr().err
    texts = load_texts(None, Tokenizer.load(short), length=97, samples=3)
    with pytest.raises(ConfigError, match="longer than the model's context; have: 97 tokens; need: at most 96 tokens"):
        make_kv_scales(short, short, texts, RunOptions(kv=KVOptions("fp8"), device="cpu"))
