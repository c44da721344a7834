"""What a format finds while it loads reaches the report once for each text; what it refuses ends the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.plugin import DeviceInfo, LinearOp, LinearShard, LinearSpec, TensorInfo
from qengine.runtime.loader import LoadPlan, load, resolve
from qengine_dense.backend import DenseQuant, DenseScheme
from toy_models import make_tiny


class FindingScheme(DenseScheme):
    """16-bit, with notes from the headers and from the data; modules whose name ends with `refused` are refused."""

    refused = ""

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        names = [shard.spec.name for shard in shards]
        if bad := [name for name in names if self.refused and name.endswith(self.refused)]:
            raise ValueError(f"{', '.join(bad)}: odd data")
        op = super().bind(shards, device, info, dtype)
        op.notes = [(name, "found in the data") for name in names if name.endswith(("k_proj", "down_proj"))]
        return op


class FindingQuant(DenseQuant):
    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> FindingScheme | None:
        scheme = FindingScheme()
        if spec.name.endswith("o_proj"):
            scheme.notes = ("found in the headers",)
        return scheme


def plan(folder: Path) -> LoadPlan:
    model, plain, checkpoint = plan_folder(make_tiny(folder, tokenizer=False))
    return resolve(model.leaves, checkpoint, FindingQuant(), DenseQuant(), plain.info, torch.float32)


def test_notes_are_grouped_by_text(tmp_path: Path) -> None:
    made = plan(tmp_path)
    two = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert made.warnings == [f"found in the headers (2 modules: {', '.join(two)})"]
    (warning,) = load(made).warnings
    assert warning.startswith("found in the data (4 modules: ") and warning.endswith("and 1 more)")
    # Control: formats without notes warn of nothing.
    _, plain, _ = plan_folder(tmp_path)
    assert plain.warnings == [] and load(plain).warnings == []


def test_all_refused_modules_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    monkeypatch.setattr(FindingScheme, "refused", "v_proj")
    with pytest.raises(CheckpointError, match=r"2 module\(s\).*0\.self_attn\.v_proj, \S+1\.self_attn\.v_proj: odd"):
        load(made)
