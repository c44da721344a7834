"""`inspect` on files of real tools: it says of each, from headers alone, what loading it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint_logits import folders
from load_model import plan_folder
from qengine.cli.main import main
from qengine.errors import UserError
from qengine.runtime import checkpoint
from qengine.runtime.safetensors_file import read_header


@pytest.mark.parametrize("name", folders(""))
def test_says_what_loading_says(
    name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints / name
    try:
        _, plan, _ = plan_folder(folder)
        formats = plan.schemes
    except UserError:
        formats = None

    def refuse(*_: object) -> None:
        raise AssertionError("inspect read a tensor")

    monkeypatch.setattr(checkpoint, "read_tensor", refuse)
    code = main(["inspect", "--json", "--device", "cpu", str(folder)])
    found = json.loads(capsys.readouterr().out)
    assert code == (formats is None) and found["servable"] == (formats is not None)
    if formats is None:
        assert found["problems"]
        return
    counts: dict[str, int] = {}
    for group in found["modules"]:
        counts[group["scheme"]] = counts.get(group["scheme"], 0) + group["count"]
    assert counts == {label: list(formats.values()).count(label) for label in set(formats.values())}
    held = sum(length for f in folder.glob("*.safetensors") if f.name != "reference.safetensors"
               for _, length in read_header(f).spans.values())  # fmt: skip
    used = sum(size["file"] for size in found["bytes"].values())
    assert 0 <= held - used <= (4096 if "kv8" in name or "attn8" in name else 0)  # KV scales belong to no scheme
    assert all(size["file"] or size["gpu"] or size["cpu"] for size in found["bytes"].values())
    devices = [a["device"] for a in next(iter(found["kernels"].values()))]
    assert devices == ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "cpu"]
    for label, answers in found["kernels"].items():
        assert all(a["kind"] != "refused" or a["reason"] for a in answers), label
