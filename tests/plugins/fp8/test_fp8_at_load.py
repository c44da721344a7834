"""`--quant fp8` on a 16-bit checkpoint: converted module by module while it loads, without a copy."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8_files import pack_channel
from load_model import load_folder, plan_folder
from qengine.config import EngineConfig
from qengine.errors import CheckpointError
from qengine.layers.linear import Linear
from qengine.prepare import prepare_model
from qengine.runtime.loader import load
from qengine_kernels.testing import relative_error
from torch_kv import PagedRun
from toy_engine import request, run, toy_engine
from toy_models import make_tiny, write_model

IDS = [72, 101, 108, 108, 111, 256, 3, 200]


def logits(folder: Path, flag: str | None = None) -> torch.Tensor:
    return PagedRun(load_folder(folder, flag), [IDS]).run()[0]


def packed_copy(folder: Path, target: Path) -> Path:
    """The same model with every linear but the head replaced by what an independent packer makes of it, dense."""
    tensors = load_file(folder / "model.safetensors")
    meaning = {n: pack_channel(t.float())[1] if n.endswith("_proj.weight") else t for n, t in tensors.items()}
    return write_model(target, json.loads((folder / "config.json").read_text()), meaning)


def test_it_is_the_per_channel_conversion(tmp_path: Path) -> None:
    dense = make_tiny(tmp_path / "dense", dtype="bfloat16")
    want, exact = logits(packed_copy(dense, tmp_path / "packed")), logits(dense)
    got = logits(dense, "fp8")
    assert relative_error(got, want) < 1e-5
    assert relative_error(got, exact) > 1e-3, "nothing was converted"


@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embedding_stay_16_bit(tied: bool, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, dtype="bfloat16", tie_word_embeddings=tied)
    model, plan, checkpoint = plan_folder(folder, "fp8", torch.bfloat16)
    report = load(plan)
    assert [scheme.format for scheme in model.lm_head.schemes] == ["16-bit"]
    others = [leaf for leaf in model.leaves if isinstance(leaf, Linear) and leaf is not model.lm_head]
    assert {scheme.format for leaf in others for scheme in leaf.schemes} == {"fp8 per channel, made at load"}
    made = report.bytes_by_format["fp8 per channel, made at load"]
    linears = sum(t.numel() for n, t in load_file(folder / "model.safetensors").items() if "_proj." in n)
    assert linears < made < 1.02 * linears
    assert made == plan.bytes_by_format["fp8 per channel, made at load"]
    assert checkpoint.is_dense()


def test_prepare_makes_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_tiny(tmp_path / "dense", dtype="bfloat16")
    said: list[str] = []
    config = prepare_model(EngineConfig(model=str(folder), quantization="fp8"), said.append)
    assert config.model == str(folder) and not said
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and folder not in p.parents]


def test_it_serves(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, dtype="bfloat16")
    engine = toy_engine(folder, quantization="fp8")
    assert len(run(engine, [request("a", IDS, max_tokens=4)]).ids["a"]) == 4
    report = "\n".join(engine.facts.report)
    assert "fp8 per channel, made at load" in report and "weight-only mode" in report


def test_no_more_than_one_module_is_held_in_16_bits(tmp_path: Path) -> None:
    _, plan, checkpoint = plan_folder(make_tiny(tmp_path, dtype="bfloat16", num_hidden_layers=3), "fp8")
    alive: dict[str, weakref.ref[torch.Tensor]] = {}
    most = 0
    read = checkpoint.read

    def watched(name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(name)
        if "_proj." in name:
            held = [n for n, ref in alive.items() if ref() is not None]
            module = name.rsplit(".", 2)[0]
            assert all(n.startswith(module) for n in held), f"{held} are still there when {name} is read"
            most = max(most, len(held) + 1)
            alive[name] = weakref.ref(tensor)
        return tensor

    checkpoint.read = watched  # type: ignore[method-assign]
    load(plan)
    assert most == 3, "q, k and v are read together, and nothing else"
    assert all(ref() is None for ref in alive.values())


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    held = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    held[name][3, 5] = float("nan")
    save_file(held, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} cannot become FP8: the weight is not finite"):
        load_folder(folder, "fp8")


def test_dummy_weights_take_the_format_too(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (folder / "model.safetensors").unlink()
    engine = toy_engine(folder, quantization="fp8", load_format="dummy")
    assert "fp8 per channel" in "\n".join(engine.facts.report)
