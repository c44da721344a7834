"""The damage report: every figure in the JSON, readable lines, a page that is complete in itself."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from qengine.cli.main import main
from qengine_calibration import damage, damage_report, report
from qengine_calibration.damage import write_report
from toy_models import make_tiny


def facts(**changed: Any) -> dict[str, Any]:
    layers = {
        f"model.layers.{i}.self_attn": {
            side: {
                "scale": [0.1], "amax": [44.8, 0.0], "clip_rate": 0.001, "relative_error": 0.02, "only_zeros": i == 1,
            } for side in "kv"
        } | {"tokens": 400, "attention_output_error": 0.02 + i, "attention_output_error_at_scale_1": 0.4}
        for i in range(2)
    }  # fmt: skip
    linears = {
        f"model.layers.{i}.mlp.<b>up_proj": {"tokens": 400, "weight_error": 0.1, "output_error": 0.05 * (i + 1)}
        for i in range(7)
    }
    return {
        "text": {"tokens": 400, "num_sequences": 4, "length": 100, "source": "a.txt", "rows_used": 3, "rows_given": 9},
        "weights": {"format": "awq", "options": {"group_size": 64}}, "linears": linears, "cold": {"e.0": 0, "e.1": 7},
        "cold_rule": "a rule",
        "kv": {
            "method": "mse", "granularity": "head", "layers": layers, "most_damage": 0.2,
            "kept_16_bit": ["model.layers.1.self_attn"],
        },
        "end_to_end": {"not_measured": "too large"},
    } | changed  # fmt: skip


class Page(html.parser.HTMLParser):
    """Checks that every tag is closed in order; collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_lines() -> None:
    lines = damage_report.lines(facts())
    assert lines[0].endswith("a.txt (3 of 9 rows used)")
    assert "7 linears: relative output error 0.200 on average, 0.350 at model.layers.6.mlp.<b>up_proj" in lines[1]
    assert "2 linears saw too little text, a rule: " in lines[2] and "e.1 (7 tokens)" in lines[2]
    assert "attention-output error 0.5200, at scale 1.0 0.4000" in lines[3] and "0.1 % of" in lines[3]
    assert "1 layers keep a 16-bit KV cache, as their error is above 0.2: model.layers.1" in lines[4]
    assert lines[-1] == "end to end: not measured (too large)"


def test_page() -> None:
    page = Page()
    source = damage_report.html_page(facts())
    page.feed(source)
    assert page.open == [] and source.count("data:image/png;base64,") == 3
    for text in ("model.layers.6.mlp.<b>up_proj", "0.3500", "44.8", "16-bit", "e.1", "not measured"):
        assert text in page.text
    bare = damage_report.html_page(facts(cold={}, kv=None, end_to_end=None))
    assert bare.count("data:image/png;base64,") == 1 and "KV cache" not in bare


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    said: list[str] = []
    write_report(facts(), tmp_path / "calibration.json", said.append)
    assert json.loads((tmp_path / "calibration.json").read_text()) == facts()
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"] and "qengine-llm[report]" in said[0]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """End to end: what the 16-bit model and the result say about held-out text, beside the figures by layer."""
    source, out = make_tiny(tmp_path / "source", dtype="float16"), tmp_path / "copy"
    (tmp_path / "t.txt").write_text("some text " * 100)
    common = ["--data", str(tmp_path / "t.txt"), "--seq-len", "64", "--device", "cpu", "-q", "--eval-tokens", "300"]
    argv = ["calibrate", str(source), "--quant", "gptq", "--group-size", "64", "--kv-dtype", "fp8"]
    assert main([*argv, "--out", str(out), *common]) == 0
    err = capsys.readouterr().err
    assert "end to end on 300 tokens of the built-in held-out text: perplexity" in err
    found = json.loads((out / "calibration.json").read_text())
    end = found["end_to_end"]
    assert end["a"]["kv_dtype"] != end["b"]["kv_dtype"] and "gptq" in end["b"]["weights"]
    assert 0 < end["comparison"]["kl_mean"] < end["comparison"]["kl_p99"] and len(found["kv"]["layers"]) == 2
    assert found["memory"]["planned"] > 0
    page = Page()
    page.feed((out / "calibration.html").read_text())
    assert page.open == [] and "top-1 agreement" in page.text
    # Scales alone: the report has another name, since a copy's own may lie there.
    assert main(["calibrate", str(source), "--kv-dtype", "fp8", "--out", str(tmp_path / "kv"), *common]) == 0
    end = json.loads((tmp_path / "kv" / "kv_calibration.json").read_text())["end_to_end"]
    assert "calibration file" in end["b"]["kv_scale_sources"]


def test_a_model_that_does_not_fit_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qengine.config import EngineConfig
    from qengine.errors import CapacityError

    def short(*a: object, **k: object) -> None:
        raise CapacityError("no room", have="1 GiB", need="2 GiB")

    monkeypatch.setattr(damage, "evaluate", short)
    config = EngineConfig(model="x")
    assert damage.end_to_end(config, config, 300) == {"not_measured": "no room; have: 1 GiB; need: 2 GiB"}
