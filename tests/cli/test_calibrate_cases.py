"""`qengine calibrate` on what goes wrong elsewhere: large keys (C15 b), and lopsided experts with odd rows (C26)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from calibration_models import biased, lopsided_moe
from qengine.cli.main import main
from toy_engine import request, run, toy_engine


def test_c15_scales_of_large_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 0's scale is its largest key by 448, layer 1's far smaller; outputs are clearly nearer with the file."""
    model, data, out = biased(tmp_path / "tiny-bias"), tmp_path / "texts.jsonl", tmp_path / "scales"
    data.write_text("".join(json.dumps({"text": f"row {i} about nothing. " * 5}) + "\n" for i in range(20)))
    argv = ["calibrate", str(model), "--kv-dtype", "fp8", "--data", str(data), "--out", str(out), "--method", "amax"]
    assert main([*argv, "--eval-tokens", "400", "--device", "cpu", "-q"]) == 0
    err = capsys.readouterr().err
    assert "20 of 20 rows used" in err and "at scale 1.0" in err
    found = json.loads((out / "kv_calibration.json").read_text())
    first, second = (found["kv"]["layers"][f"model.layers.{i}.self_attn"] for i in (0, 1))
    for scale, amax in zip(first["k"]["scale"], first["k"]["amax"], strict=True):
        assert scale == pytest.approx(amax / 448) and 1.9 < scale < 2.9
    assert max(second["k"]["scale"]) < min(first["k"]["scale"]) / 50
    assert {"amax", "clip_rate"} <= set(first["k"]) and first["attention_output_error"] > 0
    assert first["k"]["clip_rate"] == 0

    argv = ["eval", str(model), "--kv-dtype", "fp8", "--max-tokens", "400", "--device", "cpu", "--quiet"]
    assert main([*argv, "--json", str(tmp_path / "without.json")]) == 0
    assert "without scales" in capsys.readouterr().out
    without = json.loads((tmp_path / "without.json").read_text())["comparison"]["kl_mean"]
    assert without / found["end_to_end"]["comparison"]["kl_mean"] > 1.5


@pytest.mark.parametrize("quant", ["awq", "gptq", "fp8"])
def test_c26_lopsided_experts_and_odd_rows(
    quant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows (blank, one token, 5000 tokens), eight experts of which two are chosen, no network."""

    def away(*a: object) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", away)
    model, out = lopsided_moe(tmp_path / "moe", tokenizer=True), tmp_path / "copy"
    rows = [""] * 20 + ["x"] * 10 + ["y" * 5000] * 4 + ["words " * 10] * 30
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    options = {"awq": ["--group-size", "32"], "gptq": ["--group-size", "32"], "fp8": ["--activations", "static"]}
    argv = ["calibrate", str(model), "--quant", quant, "--kv-dtype", "fp8", "--out", str(out), *options[quant]]
    common = ["--data", str(tmp_path / "rows.jsonl"), "--seq-len", "128", "--samples", "20", "--eval-tokens", "0"]
    assert main([*argv, *common, "--device", "cpu", "-q"]) == 0
    err = capsys.readouterr().err
    assert "of 64 rows used" in err and "2,560 tokens" in err
    rule = "they are rounded by their weights alone: model"
    if quant == "fp8":
        rule = "their inputs get the scale of that expert of the layer which saw the largest: model"
    assert "36 linears saw too little text, " in err and rule in err and "(0 tokens)" in err

    found: dict[str, Any] = json.loads((out / "calibration.json").read_text())
    assert set(found["cold"].values()) == {0}
    for layer in ("layers.0.", "layers.1."):
        experts = {name: f["tokens"] for name, f in found["linears"].items() if layer in name and "experts." in name}
        idle = {name.split("experts.")[1][0] for name in experts if name in found["cold"]}
        assert len(experts) == 8 * 3 and len(idle) == 6
        assert {tokens for name, tokens in experts.items() if name.split("experts.")[1][0] not in idle} == {2560}
    scales = {n: t.float() for n, t in load_file(out / "model.safetensors").items() if "scale" in n}
    kv = load_file(out / "kv_scales.safetensors")
    assert len(scales) > 50 and len(kv) == 4
    for name, t in (scales | kv).items():
        ones = 0
        if name in kv:  # scales of 1 are there on purpose, and counted
            layer, _, leaf = name.rpartition(".")
            ones = found["kv"]["layers"][layer][leaf[0]]["left_at_1"]
        assert torch.isfinite(t).all() and (t > 0).all() and int((t == 1).sum()) == ones, name
    left = sum(f[side]["left_at_1"] for f in found["kv"]["layers"].values() for side in "kv")
    assert not left or f"{left} of 8 scales are 1.0, as with no other one" in err
    engine = toy_engine(out, kv_cache_dtype="fp8")
    assert len(run(engine, [request("a", [1, 2, 3], max_tokens=3)]).ids["a"]) == 3
