"""Layers and experts that config.json does not count: refused with the field, unless they are known to be needless."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo
from qengine.runtime.surplus import surplus
from toy_models import make_tiny, make_tiny_awq, write_json
from toy_moe import make_moe

MODULES = [f"model.layers.{i}.{name}" for i in range(2) for name in ("norm", "mlp.gate", "mlp.experts.0.up")]


def config_says(folder: Path, **fields: object) -> None:
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | fields)


def add(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


def found(*names: str, shape: tuple[int, ...] = (2,), **config: object) -> tuple[list[str], set[str]]:
    """(errors, needless tensors) of a model of two layers with one expert each."""
    out = surplus(names, {name: TensorInfo(name, "F16", shape) for name in names}, MODULES, config)
    return [str(error) for error in out.errors], out.needless


@pytest.mark.parametrize("quantised", [False, True], ids=["dense", "awq"])
def test_a_layer_more_than_the_config_counts(quantised: bool, tmp_path: Path) -> None:
    if quantised:
        make_tiny_awq(tmp_path, tokenizer=False)
    else:
        make_tiny(tmp_path, tokenizer=False)
    assert not plan_folder(tmp_path)[1].warnings  # control
    config_says(tmp_path, num_hidden_layers=1)
    words = r"have: num_hidden_layers 1, the file has model\.layers\.0\.\.1; need: num_hidden_layers 2"
    with pytest.raises(CheckpointError, match=words):
        plan_folder(tmp_path)


@pytest.mark.parametrize(("family", "field"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_(local_)?experts")])
def test_more_experts_than_the_config_counts(family: str, field: str, tmp_path: Path) -> None:
    """The router is of another shape then, which the message about the experts comes before."""
    make_moe(tmp_path, family)
    plan_folder(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    config_says(tmp_path, **{name: 3 for name in written if re.fullmatch(field, name)})
    with pytest.raises(CheckpointError, match=rf"holds experts .*have: {field} 3, .*experts\.0\.\.3; need: {field} 4"):
        plan_folder(tmp_path)


def test_layers_that_predict_further_tokens_are_a_note(tmp_path: Path) -> None:
    """As DeepSeek and GLM append them: a decoder layer with a projection of its own."""
    make_tiny(tmp_path, tokenizer=False)
    stored = load_file(tmp_path / "model.safetensors")
    layer = {n.replace(".1.", ".2."): t.clone() for n, t in stored.items() if n.startswith("model.layers.1.")}
    add(tmp_path, **layer)
    with pytest.raises(CheckpointError, match="need: num_hidden_layers 3"):  # control: nothing tells what it is
        plan_folder(tmp_path)
    config_says(tmp_path, num_nextn_predict_layers=1)
    plan = plan_folder(tmp_path)[1]
    told = "ignored: model.layers.2, a layer that predicts further tokens"
    assert plan.warnings == [] and [note for note in plan.notes if note.startswith(told)]
    config_says(tmp_path, num_nextn_predict_layers=0)
    add(tmp_path, **{"model.layers.2.eh_proj.weight": torch.ones(256, 512)})
    plan = plan_folder(tmp_path)[1]
    assert plan.warnings == [] and [note for note in plan.notes if note.startswith(told)]


def test_what_counts_as_one_of_the_models_own() -> None:
    (error,), _ = found("model.layers.2.norm.weight", "model.layers.4.mlp.gate.qweight", num_hidden_layers=2)
    assert "have: num_hidden_layers 2, the file has model.layers.0..4; need: num_hidden_layers 5" in error
    (error,), _ = found("model.layers.2.norm.weight", text_config={"n_layer": 2}, num_hidden_layers=9)
    assert "have: text_config.n_layer 2" in error
    (error,), _ = found("model.layers.2.norm.weight")
    assert "have: layers by config.json 2" in error
    (error,), _ = found("model.layers.1.mlp.experts.1.up.weight", n_routed_experts=1)
    assert "have: n_routed_experts 1, the file has model.layers.*.mlp.experts.0..1" in error


@pytest.mark.parametrize(
    "name",
    [
        "visual.layers.2.norm.weight",  # another tower
        "model.layers.2.adapter.weight",  # nothing that the model has
        "model.layers.1.mystery.weight",
        "model.layers.1.norm.other",  # a layer that is there
        "mtp.layers.0.norm.weight",
        "model.layers.00000000002.norm.weight",
        "model.layers." + "9" * 5000 + ".norm.weight",
        "2",
        "",
    ],
)
def test_what_the_model_is_not_like_stays_a_warning(name: str) -> None:
    assert found(name, num_hidden_layers=2) == ([], set())


def test_empty_tensors_and_one_layer_beyond_the_predicting_ones() -> None:
    assert found("model.layers.2.norm.weight", shape=(0,)) == ([], set())
    names = "model.layers.2.norm.weight", "model.layers.3.norm.weight"
    (error,), needless = found(*names, num_hidden_layers=2, num_nextn_predict_layers=1)
    assert needless == {names[0]} and "model.layers.0..3; need: num_hidden_layers 4" in error
