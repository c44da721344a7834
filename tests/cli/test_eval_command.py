"""`qengine eval`: which two settings it compares, what it prints and writes, and what it refuses at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qengine.cli import eval as command
from qengine.cli.commands import build_parser
from qengine.cli.main import main
from qengine.cli.options import config_from, dashed
from qengine.config import EngineConfig
from qengine_calibration import report
from toy_models import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def settings(*argv: str) -> list[tuple[str | None, str | None, str, str]]:
    args, unknown = build_parser()[0].parse_known_args(["eval", *dashed(argv)])
    assert unknown == []
    options = config_from(command.EvalConfig, args)
    configs = command.sides(options, config_from(EngineConfig, args), args.model_b)
    return [(c.model, c.quantization, c.kv_cache_dtype, c.dtype) for c in configs]


@pytest.mark.parametrize(
    ("argv", "want"),
    [
        ("", [(None, None, "auto", "auto")]),
        ("--kv-dtype fp8", [(None, None, "auto", "auto"), (None, None, "fp8", "auto")]),
        ("--kv-dtype-b fp8", [(None, None, "auto", "auto"), (None, None, "fp8", "auto")]),
        ("m --quant awq", [("m", None, "auto", "auto"), ("m", "awq", "auto", "auto")]),
        ("m n", [("m", None, "auto", "auto"), ("n", None, "auto", "auto")]),
        ("m m", [("m", None, "auto", "auto"), ("m", None, "auto", "auto")]),
        ("m n --kv-dtype fp8", [("m", None, "auto", "auto"), ("n", None, "fp8", "auto")]),
        ("m n --kv-dtype-a fp8", [("m", None, "fp8", "auto"), ("n", None, "fp8", "auto")]),
        ("m --quant-a awq --kv-dtype fp8", [("m", "awq", "auto", "auto"), ("m", "awq", "fp8", "auto")]),
        ("m n --quant-a awq", [("m", "awq", "auto", "auto"), ("n", None, "auto", "auto")]),
        ("m --dtype float32 --kv_dtype fp8", [("m", None, "auto", "float32"), ("m", None, "fp8", "float32")]),
        ("m --dtype-a float32", [("m", None, "auto", "float32"), ("m", None, "auto", "auto")]),
    ],
)
def test_the_two_settings(argv: str, want: list[tuple[str | None, str | None, str, str]]) -> None:
    assert settings(*argv.split()) == want


def test_what_fp8_kv_costs(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, page = tmp_path / "out.json", tmp_path / "out.html"
    argv = [str(tiny), "--kv-dtype", "fp8", "--device", "cpu", "--max-tokens", "600", "--window", "128"]
    assert main(["eval", *argv, "--json", str(json_file), "--html", str(page), "--quiet"]) == 0
    out, err = capsys.readouterr()
    s = json.loads(json_file.read_text())
    assert (s["a"]["kv_dtype"], s["b"]["kv_dtype"]) == ("auto", "fp8_e4m3")
    assert s["data"]["tokens"] == 600 and s["data"]["windows"] == 5 and s["data"]["rows_used"] >= 1
    assert 0 < s["comparison"]["kl_mean"] < s["comparison"]["kl_p99"]
    figures = (f"{s['comparison']['kl_p99']:.6f}", f"{s['a']['perplexity']:.4f}", "600 (limit 600)")
    assert all(text in out for text in figures)
    assert err.startswith("Memory: engines A ") and "positions at a time" in err
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data", "no/such.txt"], "no/such.txt cannot be read"),
        (["--data", "{tmp}/a.csv"], "need: a .txt, .jsonl or .parquet file"),
        (["--data", "{tmp}/bad.jsonl"], "line 1 is not JSON"),
        (["--data", "{tmp}/short.txt"], "too little text"),
        (["--json", "no/folder/x.json"], "no/folder/x.json cannot be written"),
        (["--html", "{tmp}"], "cannot be written; have: a folder"),
        (["--max-tokens", "5"], "--max-tokens is too small; have: 5; need: at least 128"),
        (["--window", "1"], "--window is too small"),
        (["--window", "2049"], "--window is longer than the context of"),
        (["--window", "2049"], "have: 2049 tokens; need: at most 2048 tokens"),
        (["--max-model-len", "64", "--window", "65"], "longer than --max-model-len; have: 65 tokens; need: at most 64"),
        (["--max-model-len", "2049"], "have: 2049 tokens; need: at most 2048 tokens"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens is too small; have: 0; need: >= 1"),
        (["--gpu-memory-utilization", "-1"], "--gpu-memory-utilization is a share; have: -1.0; need: 0 < x <= 1"),
        (["--seed", "7"], "unknown flag --seed"),
        (["--revision", "x"], "--revision is for hub models; have: the local folder"),
        (["--data-field", "x"], "--data-field names a field of --data's rows; have: 'x' for the built-in"),
        (["--one-at-a-time"], "--one-at-a-time is for two settings"),
        (["--dtype", "float32", "--dtype-a", "float32", "--dtype-b", "bfloat16"], "leave --dtype out"),
        (["--kv-dtype", "nope"], "nope"),
        (["--dtype-b", "int3"], "int3"),
        (["--kv-dtipe", "fp8"], "unknown flag --kv-dtipe; what would work: --kv-dtype"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], said: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "short.txt").write_text("x")
    assert main(["eval", str(tiny), "--device", "cpu", *(a.format(tmp=tmp_path) for a in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("qengine: error: ") and said in err


def test_no_matplotlib_is_said_before_the_work(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main(["eval", str(tiny), "--html", str(tmp_path / "x.html")]) == 2
    assert "qengine-llm[report]" in capsys.readouterr().err and not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("argv", "want"),
    [("--kv-scales s", [None, "s"]), ("--kv-scales-a s", ["s"]), ("--kv-scales-a s --kv-scales-b t", ["s", "t"])],
)
def test_calibration_files(argv: str, want: list[str | None]) -> None:
    args, _ = build_parser()[0].parse_known_args(["eval", *argv.split()])
    options = config_from(command.EvalConfig, args)
    assert [c.kv_scales for c in command.sides(options, EngineConfig(), None)] == want
