"""Whole FP8 checkpoints by an independent packer, through the loader, on the CPU and as planned for other devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint_logits import meets_reference
from fp8_models import IDS, KINDS, make
from load_model import load_folder, plan_folder
from qengine.errors import CheckpointError
from qengine.plugin import DeviceInfo
from qengine.runtime.loader import load
from torch_kv import PagedRun
from toy_engine import toy_engine


def logits(folder: Path, reread: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    model, plan, checkpoint = plan_folder(folder)
    if reread is not None:
        stored = checkpoint.read
        checkpoint.read = lambda name: reread(name, stored(name))  # type: ignore[method-assign]
    report = load(plan)
    assert not report.warnings and not plan.warnings
    return PagedRun(model, [IDS]).run()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_meets_its_meaning(kind: str, tmp_path: Path) -> None:
    folder, want = make(tmp_path, kind)
    assert meets_reference(logits(folder), want, 0.99999) is None

    def inverted(name: str, value: torch.Tensor) -> torch.Tensor:
        if not name.endswith((".weight_scale", ".weight_scale_inv")):
            return value
        return (1 / value.float()).to(value.dtype)

    assert meets_reference(logits(folder, inverted), want) is not None, "the inverted scale passes"


@pytest.mark.parametrize("kind", ["block", "block-ue8m0", "transformers-static"])
def test_transformers_reads_the_same(kind: str, tmp_path: Path) -> None:
    """Whole blocks only: it derives the block size from the grid. Told to dequantise, as it does without a GPU."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
    folder, _ = make(tmp_path, kind, **sizes)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dequantize"] = True
    (folder / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = theirs(torch.tensor([IDS])).logits[0]
    assert meets_reference(logits(folder), want, 0.9999) is None


def test_block_size_from_the_grid_misses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the block derived as rows // rows of scales, which reads 192 rows as 96 + 96 instead of 128 + 64."""
    import qengine_fp8.backend as backend
    from qengine_kernels.fp8_linear import Fp8Shard, stack_shards

    folder, want = make(tmp_path, "block")

    def derived(shards: list[Fp8Shard], block: tuple[int, int], device: torch.device) -> Any:
        for shard in shards:
            n, k = shard.codes.shape
            rows = torch.arange(n) // -(-n // len(shard.scale))
            columns = torch.arange(-(-k // 32)) * 32 // -(-k // shard.scale.shape[1])
            shard.scale = shard.scale[rows][:, columns]
        return stack_shards(shards, (1, 32), device)

    monkeypatch.setattr(backend, "stack_shards", derived)
    got = PagedRun(load_folder(folder), [IDS]).run()[0]
    assert meets_reference(got, want) is not None


def test_merged_scales_miss_it(tmp_path: Path) -> None:
    """Control: what one scale for q, k and v (and for gate and up) makes of shards a hundredth of their neighbours."""
    folder, want = make(tmp_path, "tensor")
    held = load_file(folder / "model.safetensors")
    groups = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gu", "up_proj": "gu"}

    def scale_key(name: str) -> tuple[str, str]:
        layer, part = name.removesuffix(".weight_scale").rsplit(".", 1)
        return layer, groups.get(part, part)

    largest: dict[tuple[str, str], torch.Tensor] = {}
    for name, value in held.items():
        if name.endswith(".weight_scale"):
            largest[scale_key(name)] = torch.maximum(value, largest.get(scale_key(name), value))

    def merged(name: str, value: torch.Tensor) -> torch.Tensor:
        return largest[scale_key(name)] if name.endswith(".weight_scale") else value

    assert meets_reference(logits(folder, merged), want) is not None


def test_without_fp8_hardware_a_byte_stays_a_byte(tmp_path: Path) -> None:
    """Case C10: planned for a GPU of compute capability 7.5, and run on this CPU."""
    turing = DeviceInfo("cuda", "Turing", (7, 5), 64 * 1024)
    for kind in ("tensor", "channel", "block"):
        folder, want = make(tmp_path / kind, kind, hidden_size=256, intermediate_size=512, num_key_value_heads=2)
        file_bytes = (folder / "model.safetensors").stat().st_size
        _, plan, _ = plan_folder(folder, dtype=torch.float16, info=turing)
        assert any("weight-only mode" in note and "sm_75" in note for note in plan.notes)
        assert plan.total_bytes < 1.05 * file_bytes
        model, plan, checkpoint = plan_folder(folder, dtype=torch.bfloat16)
        report = load(plan)
        (label,) = [name for name in report.bytes_by_format if name.startswith("fp8 ")]
        stored = sum(
            t.numel() * t.element_size() for n, t in load_file(folder / "model.safetensors").items() if "_proj." in n
        )
        assert report.bytes_by_format[label] < 1.05 * stored
        assert abs(report.bytes_by_format[label] - plan.bytes_by_format[label]) < 0.01 * stored
        assert any("weight-only FP8" in kernel for kernel in report.kernels)
        assert meets_reference(PagedRun(model, [IDS]).run()[0], want) is None
        assert checkpoint.quant is not None


def test_the_report_announces_the_mode(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "tensor")
    report = "\n".join(toy_engine(folder).facts.report)
    assert "weight-only mode" in report and "weight-only FP8" in report


BAD_SCALES = {
    "nan": float("nan"),
    "zero": 0.0,
    "negative": -0.5,
    "infinite": float("inf"),
}


@pytest.mark.parametrize("value", BAD_SCALES.values(), ids=BAD_SCALES)
def test_unusable_scales_are_refused_with_all_their_names(value: float, tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "static")
    names = [
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.1.mlp.down_proj.input_scale",
        "model.layers.1.mlp.up_proj.weight_scale",
    ]
    held = load_file(folder / "model.safetensors")
    save_file(held | {name: torch.tensor(value) for name in names}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_folder(folder)
    assert all(name in str(error.value) for name in names) and "finite and positive" in str(error.value)


def test_one_bad_block_and_nan_weights_are_refused(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "block")
    held = load_file(folder / "model.safetensors")
    grid = held["model.layers.0.mlp.down_proj.weight_scale_inv"].clone()
    grid[1, 2] = 0
    weight = held["model.layers.1.self_attn.v_proj.weight"].clone()
    weight.view(torch.uint8)[3, 4] = 0xFF
    change = {
        "model.layers.0.mlp.down_proj.weight_scale_inv": grid,
        "model.layers.1.self_attn.v_proj.weight": weight,
    }
    save_file(held | change, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv holds 0 \(1 of 6\)") as error:
        load_folder(folder)
    assert "model.layers.1.self_attn.v_proj.weight holds NaN" in str(error.value)


def test_missing_scales_are_listed(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "static")
    held = load_file(folder / "model.safetensors")
    gone = ["model.layers.0.mlp.up_proj.input_scale", "model.layers.1.self_attn.q_proj.weight_scale"]
    save_file({n: t for n, t in held.items() if n not in gone}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        plan_folder(folder)
    assert all(name in str(error.value) for name in gone)


def test_modules_left_in_16_bits_run_beside_fp8_ones(tmp_path: Path) -> None:
    """v_proj stays dense, q and k do not: the fused linear runs in parts."""
    folder, want = make(tmp_path, "tensor", num_hidden_layers=1)
    held = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj"
    dense = held[f"{name}.weight"].float() * held.pop(f"{name}.weight_scale")
    save_file(held | {f"{name}.weight": dense}, folder / "model.safetensors")
    assert meets_reference(logits(folder), want, 0.99999) is None
