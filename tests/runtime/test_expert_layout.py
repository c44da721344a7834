"""Experts by their own names and stacked in one tensor: both load, from headers cut or renamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_reference import TOLERANCE, random_sequences, reference_logits, worst
from load_model import load_folder, plan_folder
from qengine.errors import CheckpointError
from qengine.models.model import Model
from qengine.plugin import TensorInfo
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.loader import load
from torch_kv import PagedRun
from toy_moe import FAMILIES, make_moe

SEQUENCES = random_sequences((9, 4))
LAYER = "model.layers.1"


def logits(model: Model) -> list[torch.Tensor]:
    return PagedRun(model, SEQUENCES).run()


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Add, replace or (None) drop tensors."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **change}
    save_file({n: t.clone() for n, t in tensors.items() if t is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("in_memory_layout", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_load(family: str, in_memory_layout: bool, tmp_path: Path) -> None:
    reference = make_moe(tmp_path, family, in_memory_layout=in_memory_layout)
    stored = load_file(tmp_path / "model.safetensors")
    assert (f"{LAYER}.mlp.experts.gate_up_proj" in stored) is in_memory_layout
    model, plan, checkpoint = plan_folder(tmp_path)
    assert plan.warnings == []
    noted = any("4 tensors hold all experts" in note for note in checkpoint.notes)
    assert noted is in_memory_layout
    load(plan)
    assert worst(logits(model), reference_logits(reference, SEQUENCES)) < TOLERANCE


def test_gates_come_before_ups(tmp_path: Path) -> None:
    """Control: with the halves of the stacked tensor swapped, the logits are others."""
    reference = make_moe(tmp_path, in_memory_layout=True)
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    stored = load_file(tmp_path / "model.safetensors")[name]
    rewrite(tmp_path, {name: stored.roll(stored.shape[1] // 2, 1)})
    assert worst(logits(load_folder(tmp_path)), reference_logits(reference, SEQUENCES)) > 100 * TOLERANCE


COMMON = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def test_mixtral_under_the_common_names(tmp_path: Path) -> None:
    reference = make_moe(tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {}
    for name, t in load_file(path).items():
        for old, new in COMMON.items():
            name = name.replace(old, new)
        renamed[name] = t
    save_file(renamed, path, metadata={"format": "pt"})
    _, plan, checkpoint = plan_folder(tmp_path)
    assert f"{LAYER}.block_sparse_moe.experts.3.w2.weight" in checkpoint.tensors and plan.warnings == []
    assert worst(logits(load_folder(tmp_path)), reference_logits(reference, SEQUENCES)) < TOLERANCE


def test_stacked_experts_are_read_one_at_a_time(tmp_path: Path) -> None:
    make_moe(tmp_path, "qwen3_moe", in_memory_layout=True)
    _, plan, checkpoint = plan_folder(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"{LAYER}.mlp.experts.2.up_proj.weight"
    assert torch.equal(checkpoint.read(name), stored[f"{LAYER}.mlp.experts.gate_up_proj"][2, 64:])
    assert checkpoint.nbytes == sum(t.numel() * t.element_size() for t in stored.values())
    largest = max(len(names) for leaf, names in plan.order if ".experts." in leaf.name)
    assert largest == 2  # gate and up of one expert


def test_experts_that_are_not_there_are_listed(tmp_path: Path) -> None:
    make_moe(tmp_path)
    gone = [f"{LAYER}.block_sparse_moe.experts.{e}.w{i}.weight" for e in range(4) for i in (1, 2, 3)]
    rewrite(tmp_path, dict.fromkeys(gone))
    with pytest.raises(CheckpointError, match=r"12 tensor\(s\).*experts\.0\.w1\.weight.*and 2 more.*unfinished"):
        plan_folder(tmp_path)


def test_stacked_tensors_that_cannot_be_cut_are_refused_by_name(tmp_path: Path) -> None:
    make_moe(tmp_path, in_memory_layout=True)
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    good = load_file(tmp_path / "model.safetensors")[name]
    for bad in (good.to(torch.int8), good.flatten(1), good[:, 1:]):
        rewrite(tmp_path, {name: bad})
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj holds all experts.*have"):
            plan_folder(tmp_path)
    rewrite(tmp_path, {name: good, f"{LAYER}.block_sparse_moe.experts.1.w3.weight": good[1, 96:]})
    with pytest.raises(CheckpointError, match=r"experts\.1\.w3\.weight twice"):
        plan_folder(tmp_path)
    rewrite(tmp_path, {name: good[:3], f"{LAYER}.block_sparse_moe.experts.1.w3.weight": None})
    with pytest.raises(CheckpointError, match=r"2 tensor\(s\) that the model needs.*experts\.3\.w1"):
        plan_folder(tmp_path)


def test_pieces_must_make_up_the_tensor(tmp_path: Path) -> None:
    make_moe(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ValueError, match="do not make up"):
        checkpoint.split("model.norm.weight", [TensorInfo("a", "F32", (10,))])
    assert "model.norm.weight" in checkpoint.tensors
