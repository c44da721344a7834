"""`qengine bench`: flags, figures and files of its three measurements, on toy models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fake_engine
from qengine.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from qengine.cli.commands import build_parser
from qengine.cli.main import main
from qengine.cli.options import config_from, dashed
from qengine.config import EngineConfig, options
from server_process import FAKE, running
from toy_models import make_succ, make_tiny

SMALL = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "8M"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_latency(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.json"
    argv = ["--input-len", "12", "--output-len", "5", "--batch-size", "3", *SMALL]
    argv += ["--num-iters", "2", "--num-iters-warmup", "1", "--output-json", str(out)]
    assert main(["bench", "latency", str(tiny), *argv]) == 0
    found = json.loads(out.read_text())
    assert len(found["latencies"]) == 2 and min(found["latencies"]) <= found["avg_latency"] <= max(found["latencies"])
    assert 1e3 * found["avg_latency"] > found["median_ttft_ms"] + 4 * 0.5 * found["median_tpot_ms"] > 0
    shown, said = capsys.readouterr()
    assert "3 x 12 in, 5 out" in shown and "tokens/s a stream" in shown
    assert "Asynchronous scheduling: off" in said, "the engine's own report goes to stderr"


def test_lengths_that_no_context_holds(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One batch of a length is refused; a mixture is cut, which is said."""
    argv = ["--device", "cpu", "--kv-cache-memory-bytes", "1M", "--max-model-len", "64", "--output-len", "4"]
    assert main(["bench", "latency", str(tiny), *argv, "--input-len", "61"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--input-len 61 and --output-len 4 do not fit" in error and "have: 64 tokens; need: 65" in error
    assert main(["bench", "throughput", str(tiny), *argv, "--input-len", "61", "--num-prompts", "1"]) == 0
    assert "cut to the model's context of 64 tokens" in capsys.readouterr().err
    assert main(["bench", "throughput", str(tiny), *argv, "--input-len", "60", "--num-prompts", "1"]) == 0
    assert "cut to" not in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--async-scheduling", "--disable-detokenize"]], ids=["plain", "async"])
def test_throughput(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]) -> None:
    out = tmp_path / "throughput.json"
    argv = ["--input-len", "20", "--output-len", "6", "--num-prompts", "9", "--random-prefix-len", "4"]
    assert main(["bench", "throughput", str(tiny), *argv, *SMALL, *extra, "--output-json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["num_requests"] == 9 and found["total_num_tokens"] == 9 * (24 + 6)
    assert found["total_output_tokens"] == 54 and found["failed"] == 0
    assert found["output_throughput"] == pytest.approx(54 / found["elapsed_time"])
    assert found["kernels_compiled"] == 0 and found["p99_itl_ms"] > 0
    assert "time to first token" in capsys.readouterr().out


def test_throughput_of_chat_lengths_stays_in_the_context(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "chat.json"
    argv = ["--dataset-name", "sharegpt-like", "--num-prompts", "5", "--max-model-len", "48", "--num-warmups", "0"]
    assert main(["bench", "throughput", str(tiny), *argv, *SMALL, "--output-json", str(out)]) == 0
    assert json.loads(out.read_text())["total_num_tokens"] <= 5 * 48


def test_serve_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_succ(tmp_path / "model", dict.fromkeys(range(320), 97))
    fake_engine.write_script(folder, dict.fromkeys(range(320), 97))
    with running(folder, FAKE, served_model_name=["toy"]) as server:
        argv = ["--base-url", server.url, "--num-prompts", "7", "--random-input-len", "6", "--random-output-len", "5"]
        argv += ["--save-result", "--result-dir", str(tmp_path), "--metric-percentiles", "50,99", "--ignore-eos"]
        assert main(["bench", "serve", *argv]) == 0
        assert main(["bench", "serve", *argv, "--backend", "openai-chat", "--result-filename", "chat.json"]) == 0
    files = [f for f in tmp_path.glob("*.json") if f.name != "chat.json"]
    assert len(files) == 1 and files[0].name.startswith("openai-infqps-toy-")
    for path in (*files, tmp_path / "chat.json"):
        found = json.loads(path.read_text())
        assert found["completed"] == 7 and found["total_output_tokens"] == 35 and found["model_id"] == "toy"
        assert found["p99_ttft_ms"] > 0 and "p90_ttft_ms" not in found
    assert "7 requests in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("", ["nothing to measure", "latency | throughput | serve"]),
        ("latency --batch-size 0", ["--batch-size is too small", "have: 0"]),
        ("latency --kv-dtyp fp8", ["unknown flag --kv-dtyp", "--kv-dtype"]),
        ("throughput --dataset-name hymns", ["--dataset-name", "'hymns'", "sharegpt-like"]),
        ("throughput --metric-percentiles 50,x", ["--metric-percentiles", "50,90,99"]),
        ("throughput --output-json nowhere/x.json", ["not there", "nowhere"]),
        ("serve --request-rate 0", ["--request-rate must be positive"]),
        ("serve --percentile-metrics ttft,love", ["--percentile-metrics", "love", "e2el"]),
        ("serve --requst-rate 3", ["unknown flag --requst-rate", "--request-rate"]),
        ("serve --port 9", ["no model can be asked for", "127.0.0.1:9", "qengine serve"]),
        ("frobnicate", ["invalid choice", "frobnicate"]),
    ],
)
def test_wrong_input_is_one_line(argv: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("qengine: error: ") and err.count("\n") == 1
    assert [p for p in parts if p not in err] == []


def test_every_engine_flag_is_taken_and_no_name_is_used_twice() -> None:
    parser, _ = build_parser()
    for action in ("latency", "throughput"):
        args, unknown = parser.parse_known_args(
            ["bench", action, "m", *dashed(["--max_num_seqs", "7", "--kv-dtype", "fp8", "--input-len", "3"])]
        )
        assert unknown == [] and config_from(EngineConfig, args).max_num_seqs == 7
    engine = {field.name for field, _ in options(EngineConfig)}
    for cls in (LatencyOptions, ThroughputOptions):
        assert not engine & {field.name for field, _ in options(cls)}
    args, _ = parser.parse_known_args(["bench", "serve", "--input-len", "3", "--request-rate", "inf"])
    found = config_from(ServeOptions, args)
    assert found.random_input_len == 3 and found.request_rate == float("inf")
