"""Quantised checkpoints that are not whole (case C11 in every format): refused with the names.

Each format's file as an independent writer makes it loads first; each damage must then end in an error that lists what
is gone, or in a warning where nothing is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from awq_files import make_awq
from compressed_tensors_files import group_of, int_tensors, quant_config, weights
from fp8_files import make_tiny_fp8, pack_channel
from gptq_files import Style, make_tiny_gptq
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.loader import load
from toy_models import llama_config, llama_tensors, write_json, write_model

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"


def compressed(folder: Path) -> None:
    config = llama_config(dtype="bfloat16", quantization_config=quant_config(group_of(weights(4, "group", 128))))
    held: Tensors = {}
    for name, t in llama_tensors(config).items():
        if name.endswith("_proj.weight"):
            parts, _ = int_tensors(t, 4, 128)
            held |= {f"{name.removesuffix('.weight')}.{leaf}": value for leaf, value in parts.items()}
        else:
            held[name] = t.bfloat16()
    write_model(folder, config, held)


@dataclass(frozen=True)
class Format:
    """`codes` and `scale` are the leaves of weights and scales."""

    write: Callable[[Path], object]
    codes: str
    scale: str


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS = {
    "awq": Format(lambda f: make_awq(f, "gemm"), "qweight", "scales"),
    "gemv": Format(lambda f: make_awq(f, "gemv"), "qweight", "scales"),
    "gptq": Format(lambda f: make_tiny_gptq(f, Style(group=64)), "qweight", "scales"),
    "fp8": Format(lambda f: make_tiny_fp8(f, pack_channel, FP8), "weight", "weight_scale"),
    "compressed-tensors": Format(compressed, "weight_packed", "weight_scale"),
}


@pytest.fixture(params=FORMATS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Format]:
    """A whole checkpoint in two shards; the second one begins with layer 1."""
    made: Format = FORMATS[request.param]
    made.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    second = [name for name in tensors if "layers.1." in name]
    for file, own in zip(SHARDS, ([n for n in tensors if n not in second], second), strict=True):
        save_file({n: tensors[n] for n in own}, tmp_path / file, metadata={"format": "pt"})
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": {n: SHARDS[n in second] for n in tensors}})
    load(plan_folder(tmp_path)[1])  # control: as it is, it loads
    return tmp_path, made


def edit(folder: Path, change: Callable[[Tensors], None], shard: int = 1, index: bool = True) -> None:
    """Change the tensors of a shard, and (index) the index with them."""
    tensors = load_file(folder / SHARDS[shard])
    change(tensors)
    save_file(tensors, folder / SHARDS[shard], metadata={"format": "pt"})
    if index:
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        kept = {n: f for n, f in listed.items() if f != SHARDS[shard]}
        write_json(folder / INDEX, {"metadata": {}, "weight_map": kept | dict.fromkeys(tensors, SHARDS[shard])})


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as e:
        load(plan_folder(folder)[1])
    return str(e.value)


def test_a_shard_is_gone(case: tuple[Path, Format]) -> None:
    folder, _ = case
    gone = list(load_file(folder / SHARDS[1]))
    (folder / SHARDS[1]).unlink()
    text = refused(folder)
    assert SHARDS[1] in text and "unfinished download" in text and f"and {len(gone) - 10} more" in text
    (folder / INDEX).unlink()
    assert "1 of 2 shards are not there" in refused(folder)


def test_the_index_names_what_no_file_holds(case: tuple[Path, Format]) -> None:
    folder, made = case
    edit(folder, lambda t: t.pop(f"{DOWN}.{made.codes}"), index=False)
    assert f"{DOWN}.{made.codes} ({SHARDS[1]})" in refused(folder)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_tensors_are_missing(case: tuple[Path, Format], part: str) -> None:
    """From every linear of a layer: all are listed."""
    folder, made = case
    leaf = getattr(made, part)

    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(f"_proj.{leaf}")]:
            del tensors[name]

    edit(folder, drop)
    text = refused(folder)
    assert len(set(re.findall(r"layers\.1\.[\w.]+_proj", text))) >= 3 and "layers.0" not in text


def test_the_config_has_a_layer_too_many(case: tuple[Path, Format]) -> None:
    folder, _ = case
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3})
    text = refused(folder)
    assert "9 tensor(s) that the model needs" in text
    assert len(set(re.findall(r"model\.layers\.2\.[a-z_.]+", text))) == 9


def test_a_layer_too_many_in_the_file(case: tuple[Path, Format]) -> None:
    folder, _ = case
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1})
    text = refused(folder)
    assert "have: num_hidden_layers 1, the file has model.layers.0..1; need: num_hidden_layers 2" in text


def test_an_unknown_tensor_is_a_warning(case: tuple[Path, Format]) -> None:
    folder, _ = case
    edit(folder, lambda t: t.update({f"{DOWN}.mystery": torch.ones(3)}))
    assert [w for w in plan_folder(folder)[1].warnings if f"{DOWN}.mystery" in w and "does not use" in w]


def test_a_byte_is_missing(case: tuple[Path, Format]) -> None:
    folder, _ = case
    for shard in SHARDS:
        data = (folder / shard).read_bytes()
        (folder / shard).write_bytes(data[:-1])
        assert shard in (text := refused(folder)) and str(len(data)) in text
        (folder / shard).write_bytes(data)


def test_a_file_cut_short_while_it_is_read(case: tuple[Path, Format]) -> None:
    """The header was whole when the plan was made."""
    folder, _ = case
    _, plan, _ = plan_folder(folder)
    with (folder / SHARDS[1]).open("r+b") as f:
        f.truncate((folder / SHARDS[1]).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is damaged: it ended while tensor"):
        load(plan)


def test_a_stray_file_changes_nothing(case: tuple[Path, Format]) -> None:
    folder, made = case
    before = Checkpoint.open(folder)
    save_file({n: before.read(n).flip(0) for n in before.tensors}, folder / "consolidated.safetensors")
    after = Checkpoint.open(folder)
    name = f"{DOWN}.{made.scale}"
    assert torch.equal(after.read(name), before.read(name)) and "consolidated" in after.stale[0]


def test_a_tensor_that_is_there_twice(case: tuple[Path, Format]) -> None:
    """With an index, the index decides and says so; without one, nobody can."""
    folder, made = case
    name = f"{DOWN}.{made.scale}"
    want = Checkpoint.open(folder).read(name)
    edit(folder, lambda t: t.update({name: want + 1}), shard=0, index=False)
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.read(name), want)
    assert f"1 tensor(s) lie elsewhere than the index says, ignored: {name} ({SHARDS[0]})" in checkpoint.stale
    (folder / INDEX).unlink()
    assert f"{name} (in {SHARDS[0]} and in {SHARDS[1]})" in refused(folder)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_wrong_shapes_are_refused_by_name(case: tuple[Path, Format], part: str) -> None:
    folder, made = case
    name = f"{DOWN}.{getattr(made, part)}"

    def grow(tensors: Tensors) -> None:
        t = tensors[name].view(torch.uint8) if made.codes == "weight" and part == "codes" else tensors[name]
        tensors[name] = torch.cat([t, t[:1]]).contiguous().view(tensors[name].dtype)

    edit(folder, grow)
    text = refused(folder)
    assert DOWN in text and any(str(n) in text for n in load_file(folder / SHARDS[1])[name].shape)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_listed(case: tuple[Path, Format], bad: float) -> None:
    folder, made = case
    names = [f"model.layers.1.{m}.{made.scale}" for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]

    def spoil(tensors: Tensors) -> None:
        for name in names:
            tensors[name].view(-1)[0] = bad

    edit(folder, spoil)
    text = refused(folder)
    assert "3 module(s) hold data that cannot be used" in text
    assert all(name.rpartition(".")[0] in text for name in names) and "layers.0" not in text


def test_codes_of_another_dtype(case: tuple[Path, Format]) -> None:
    folder, made = case
    name = f"{DOWN}.{made.codes}"
    edit(folder, lambda t: t.update({name: t[name].view(torch.uint8).to(torch.int64)}))
    assert DOWN in refused(folder)
