"""FP8 checkpoints on a real GPU: rounded activations on FP8 matrix units, weight-only when told to be an older one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qengine_kernels.fp8_linear.weight as weight
from checkpoint_logits import meets_reference
from fp8_files import TABLE, encode_e4m3
from fp8_models import IDS, KINDS, make
from gpu_logits import gpu_info, gpu_logits
from load_model import plan_folder
from qengine.runtime.loader import load
from qengine_kernels.quantize_rows.reference import quantize_rows_reference
from qengine_kernels.testing import readable_id, relative_error
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=readable_id)


def rounded(x: torch.Tensor, block: int | None = None, scale: float | None = None) -> torch.Tensor:
    """What FP8 matrix units get to see of x: by token, by token and block, or with a static scale."""
    static = None if scale is None else torch.tensor([scale])
    codes, scales = quantize_rows_reference(x, encode_e4m3, 448.0, block=block, scale=static)
    width = x.shape[1] if block is None else block
    return TABLE[codes.long()] * scales.repeat_interleave(width, 1)[:, : x.shape[1]]


def rounding_of(kind: str, x: torch.Tensor) -> torch.Tensor:
    block = {"block": 128, "block-ue8m0": 128, "block-64x32": 32, "gptqmodel-block": 128}.get(kind)
    return rounded(x, block, 0.02 if "static" in kind or kind == "modelopt" else None)


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_activations(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Nearer to the model with rounded activations than the rounding is large."""
    folder, want = make(tmp_path / "rounded", kind, lambda x: rounding_of(kind, x))
    _, exact = make(tmp_path / "exact", kind)
    (got,), plan, report = gpu_logits(folder, [IDS], dtype)
    assert not any("emulated" in note for note in plan.notes)
    assert any("FP8 GEMM, activations rounded" in kernel for kernel in report.kernels)
    assert abs(report.total_bytes - plan.total_bytes) < 0.01 * plan.total_bytes
    if dtype is torch.float16:
        assert meets_reference(got, want, 0.998) is None
        assert relative_error(got, want) < relative_error(got, exact)
    else:  # a random toy amplifies bfloat16's own rounding (about 5 %) beyond that of the activations
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99


@DTYPES
@pytest.mark.parametrize("kind", ["tensor", "static", "channel", "block"])
def test_weight_only_as_on_turing(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Case C10, run: sm_75 (float16) or sm_86 on the GPU that is there."""
    folder, want = make(tmp_path, kind)
    older = gpu_info((7, 5) if dtype is torch.float16 else (8, 6))
    (got,), plan, report = gpu_logits(folder, [IDS], dtype, info=older)
    assert any("weight-only mode" in note for note in plan.notes)
    assert any(kernel.startswith("weight-only FP8: Triton") for kernel in report.kernels)
    assert report.total_bytes < 1.05 * (folder / "model.safetensors").stat().st_size
    assert meets_reference(got, want) is None


def test_made_at_load_without_a_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU there is never a 16-bit copy of a module (32 MiB for the largest), only of the rows that are being
    converted; fused shards exist twice in FP8 (16 MiB) while they are joined."""
    folder = make_tiny(tmp_path, dtype="bfloat16", hidden_size=1024, intermediate_size=8192, num_hidden_layers=2)
    monkeypatch.setattr(weight, "CHUNK_BYTES", 1 << 20)
    model, plan, _ = plan_folder(folder, "fp8", torch.bfloat16, gpu_info())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = load(plan)
    assert torch.cuda.max_memory_allocated() - before < plan.total_bytes + (24 << 20)
    assert report.total_bytes == plan.total_bytes
    x = torch.randn(3, 1024, device="cuda", dtype=torch.bfloat16)
    mlp = next(leaf for leaf in model.linears() if leaf.name.endswith("gate_proj"))
    held = load_file(folder / "model.safetensors")
    dense = torch.cat([held[f"{spec.name}.weight"] for spec in mlp.specs])
    assert 1e-3 < relative_error(mlp(x), x.cpu().float() @ dense.float().t()) < 0.06


def test_it_serves(tmp_path: Path) -> None:
    for name in ("block", "tensor"):
        folder, _ = make(tmp_path / name, name)
        engine = toy_engine(folder, device="cuda", dtype="bfloat16")
        assert len(run(engine, [request("a", IDS, max_tokens=8)]).ids["a"]) == 8
        assert "FP8 GEMM, activations rounded" in "\n".join(engine.facts.report)
