"""llm-compressor's files meet the logits of their references; read wrongly they don't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qengine_compressed_tensors.integers as integers
from checkpoint_logits import (
    assert_meets_reference,
    assert_misses_reference,
    checkpoint_root,
    folders,
    load_logits,
    meets_reference,
    reference_logits,
)
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.layers.attention import KVLayer
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import AttentionSpec, KVLayout, KVScales
from qengine.plugin.discovery import load_plugin
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.kv_dtypes import KVDtypes
from qengine.runtime.kv_scales import resolve_kv_scales
from qengine.runtime.loader import load
from qengine_compressed_tensors.fp8 import Fp8Scheme
from torch_kv import BLOCK_SIZE, PagedRun

TIGHT = 0.99999
"""The same arithmetic in float32: only the order of sums differs."""
ALL = folders("llmcompressor")


def settings(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def schemes(folder: Path) -> list[tuple[str, str, str]]:
    """(weights such as "int4", their strategy, activations such as "int8" or "none") of each group with weights."""

    def kind(args: dict[str, Any] | None) -> str:
        return "none" if args is None else f"{args['type']}{args['num_bits']}"

    groups = [g for g in settings(folder)["config_groups"].values() if g["weights"]]
    return [(kind(g["weights"]), g["weights"]["strategy"], kind(g["input_activations"])) for g in groups]


def having(wanted: Callable[[str, str, str], bool], among: list[str]) -> list[str]:
    """Those of the folders that have such a group."""
    root = checkpoint_root()
    return [name for name in among if root and any(wanted(*scheme) for scheme in schemes(root / name))]


def stored_integers(name: str) -> set[str]:
    """Last parts of the names of the checkpoint's integer tensors."""
    root = checkpoint_root()
    assert root is not None
    held = Checkpoint.open(root / name).tensors
    return {tensor.rpartition(".")[2] for tensor, info in held.items() if info.dtype in ("I8", "I32")}


FLOAT4 = having(lambda weights, _, __: weights == "float4", ALL)
READ = [name for name in ALL if name not in FLOAT4]
INT8 = having(lambda weights, _, inputs: (weights, inputs) == ("int8", "int8"), READ)
WEIGHT_ONLY = [name for name in READ if name not in INT8]
INTEGERS = having(lambda weights, _, __: weights.startswith("int"), WEIGHT_ONLY)
BYTES = [name for name in INTEGERS if "weight" in stored_integers(name)]
PACKED = [name for name in INTEGERS if "weight_packed" in stored_integers(name)]
FP8 = having(lambda weights, _, __: weights == "float8", WEIGHT_ONLY)
BY_ROW = having(lambda _, strategy, __: strategy in ("channel", "group"), READ)


@pytest.mark.parametrize("name", FLOAT4)
def test_4_bit_floats_are_refused_by_name(name: str, checkpoints: Path) -> None:
    kind = "NVFP4" if "nvfp4" in name else "MXFP4"
    with pytest.raises(CheckpointError, match=f"{kind}.*not supported"):
        load_logits(checkpoints / name)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_meets_reference(name: str, checkpoints: Path) -> None:
    report = assert_meets_reference(checkpoints / name, TIGHT)
    quantised = any(f.startswith("compressed-tensors ") for f in report.bytes_by_format)
    assert quantised == bool(settings(checkpoints / name)["config_groups"])
    unread = [w for w in report.warnings if "does not use" not in w or "_scale" not in w]  # KV scales have their reader
    assert [w for w in unread if "activations are kept in 16 bits" not in w] == []


@pytest.mark.parametrize("name", INT8)
def test_int8_activations_meet_the_tools_own_rounding(name: str, checkpoints: Path) -> None:
    """Rounding activations moves logits by far more than two right implementations differ from one another. Those do
    differ: a value beside a rounding border falls either way, and 1e-6 at the input has become 1e-3 after three layers.
    """
    got, report = load_logits(checkpoints / name)
    rounded, plain = reference_logits(checkpoints / name, "logits_fakequant"), reference_logits(checkpoints / name)
    assert any("int8" in f for f in report.bytes_by_format) and report.warnings == []
    problem = meets_reference(got, rounded, 0.998)
    assert problem is None, problem
    assert (got - rounded).norm() < 0.75 * (plain - rounded).norm(), "control: without rounding"


@pytest.mark.parametrize("name", BY_ROW)
def test_scales_of_other_rows_miss_it(name: str, checkpoints: Path) -> None:
    def neighbours(tensor: str, value: torch.Tensor) -> torch.Tensor:
        return value.roll(1, 0) if tensor.endswith("weight_scale") and len(value) > 1 else value

    assert_misses_reference(checkpoints / name, neighbours)


def spoil_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored values read as two's complement instead of offset by half their range."""
    right = integers.unpack

    def wrong(words: torch.Tensor, bits: int, count: int, packing: Any) -> torch.Tensor:
        return right(words, bits, count, packing) ^ (1 << (bits - 1))

    monkeypatch.setattr(integers, "unpack", wrong)


def spoil_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes taken for codes that are already unsigned: all of them half a range off."""
    right = integers.IntFormat._offset

    def wrong(self: integers.IntFormat, name: str, signed: torch.Tensor) -> torch.Tensor:
        return right(self, name, signed) ^ self.middle

    monkeypatch.setattr(integers.IntFormat, "_offset", wrong)


def reverse_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values from the high end of each word on: another format's order."""
    right = integers.unpack

    def wrong(words: torch.Tensor, bits: int, count: int, packing: Any) -> torch.Tensor:
        run = 32 // bits if 32 % bits == 0 else 32
        out = right(words, bits, count, packing)
        whole = count // run * run
        return torch.cat([out[:, :whole].unflatten(1, (-1, run)).flip(2).flatten(1), out[:, whole:]], 1)

    monkeypatch.setattr(integers, "unpack", wrong)


def spoil_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of one module taken for another's: half of each."""
    right = Fp8Scheme._shard

    def wrong(self: Fp8Scheme, shard: Any) -> Any:
        part = right(self, shard)
        if shard.spec.name.endswith(("up_proj", "k_proj", "o_proj")):
            part.scale = part.scale / 2
        return part

    monkeypatch.setattr(Fp8Scheme, "_shard", wrong)


@pytest.mark.parametrize(
    "name, misread",
    [(name, misread) for name in PACKED for misread in (spoil_signs, reverse_words)]
    + [(name, spoil_bytes) for name in BYTES] + [(name, spoil_fp8) for name in FP8],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_readings_miss_it(
    name: str, misread: Callable[[pytest.MonkeyPatch], None], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misread(monkeypatch)
    assert_misses_reference(checkpoints / name)


@pytest.mark.parametrize("name", [n for n in ALL if "actorder-group" in n])
def test_without_g_idx_act_order_misses_it(name: str, checkpoints: Path) -> None:
    def plain(tensor: str, value: torch.Tensor) -> torch.Tensor:
        if not tensor.endswith("g_idx"):
            return value
        return torch.arange(len(value), dtype=torch.int32) // (len(value) // (int(value.max()) + 1))

    assert_misses_reference(checkpoints / name, plain)


@pytest.mark.parametrize("name", [n for n in ALL if "asym" in n])
def test_without_its_zeros_an_asymmetric_file_misses_it(name: str, checkpoints: Path) -> None:
    def none(tensor: str, value: torch.Tensor) -> torch.Tensor:
        middle = torch.tensor(0x88888888 - (1 << 32)).int()
        return middle.expand_as(value).contiguous() if tensor.endswith("weight_zero_point") else value

    assert_misses_reference(checkpoints / name, none)


@pytest.mark.parametrize("name", having(lambda *_: True, [n for n in READ if "kv8" in n and "081" not in n]))
def test_kv_scales_of_the_file_are_the_ones_used(name: str, checkpoints: Path) -> None:
    """Per tensor or per head, by the checkpoint's own names; the model then still says what it says without them."""
    folder = checkpoints / name
    model, plan, checkpoint = plan_folder(folder)
    plugin = load_plugin("kv", "fp8")
    kv = KVDtypes.uniform(model.attention, plugin)
    scales = resolve_kv_scales(checkpoint, model.attention, kv, settings(folder))
    assert len(scales.consumed) == 2 * len(model.attention) and not scales.warnings
    for layer in model.attention:
        for kind in ("k", "v"):
            stored = checkpoint.read(f"{layer.name}.{kind}_scale").float().flatten()
            assert torch.equal(getattr(scales.scales[layer.name], kind), stored.expand(layer.spec.num_kv_heads))
    load(plan)
    ids = load_file(folder / "reference.safetensors")["input_ids"].tolist()

    def logits(factor: float) -> torch.Tensor:
        layers = iter(scales.scales.values())

        def bind(spec: AttentionSpec, num_blocks: int) -> KVLayer:
            k, v = plugin(spec, "k", torch.float32), plugin(spec, "v", torch.float32)
            layout = KVLayout.of(BLOCK_SIZE, k.layout(BLOCK_SIZE), v.layout(BLOCK_SIZE))
            storage = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
            own = next(layers)
            own = KVScales(own.k * factor, own.v * factor)
            return bind_kv_layer(k, v, layout, storage, own, model.ctx.info)

        return torch.stack(PagedRun(model, ids, bind).run())

    want = reference_logits(folder)
    right, control = ((logits(f) - want).norm() / want.norm() for f in (1.0, 1 / 64))
    assert right < 0.15 < 2 * right < control
