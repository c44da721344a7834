"""KV scales that real tools wrote: all of them are found, and rubbish is refused while a cache without scales works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from checkpoint_logits import folders
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.plugin.discovery import load_plugin
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.kv_dtypes import KVDtypes
from qengine.runtime.kv_scales import ResolvedScales, resolve_kv_scales

RUBBISH = "llmcompressor081-fp8-dynamic-kv8"
"""Written by a calibration that never ran: scales of 2.5e-21 and -4.9e-16."""
NAMES = [name for name in folders("") if re.search(r"(kv8|attn8)", name)]


def resolved(folder: Path, kv: str) -> tuple[ResolvedScales, Checkpoint]:
    model, _, checkpoint = plan_folder(folder)
    config = checkpoint.quant.config if checkpoint.quant else None
    dtypes = KVDtypes.uniform(model.attention, load_plugin("kv", kv))
    return resolve_kv_scales(checkpoint, model.attention, dtypes, config), checkpoint


@pytest.mark.parametrize("name", [n for n in NAMES if n != RUBBISH])
def test_every_layer_gets_the_files_own(name: str, checkpoints: Path) -> None:
    scales, checkpoint = resolved(checkpoints / name, "fp8")
    assert len(scales.scales) == json.loads((checkpoints / name / "config.json").read_text())["num_hidden_layers"]
    for layer, own in scales.scales.items():
        assert own.source.startswith("checkpoint ")
        for kind, leaf in zip("kv", own.source.removeprefix("checkpoint ").split(", "), strict=True):
            stored = checkpoint.read(f"{layer}.{leaf}").float().flatten()
            assert getattr(own, kind).tolist() == stored.expand(len(own.k)).tolist()
            assert leaf.rpartition(".")[2][0] == kind
    assert {n for n in checkpoint.tensors if "k_scale" in n or "v_scale" in n} <= scales.consumed
    assert scales.warnings == []


def test_rubbish_is_refused_and_a_plain_cache_works(checkpoints: Path) -> None:
    for name in [n for n in NAMES if n == RUBBISH]:
        with pytest.raises(CheckpointError, match=r"no usable KV scale.*--kv-dtype auto"):
            resolved(checkpoints / name, "fp8")
        assert "not used" in resolved(checkpoints / name, "auto")[0].notes[0]
