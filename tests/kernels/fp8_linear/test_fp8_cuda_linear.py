"""The GPU linear in its modes: weight-only and rounded activations, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8_files import TABLE, encode_e4m3, pack_block, pack_channel, pack_tensor
from qengine_kernels.fp8_linear import Fp8Shard, stack_shards
from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear, fits_library
from qengine_kernels.launch import Chip
from qengine_kernels.quantize_rows.reference import quantize_rows_reference
from qengine_kernels.testing import readable_id, relative_error
from qengine_kernels.w8a16_gemm import ByteWeight

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
SPREAD = (1.0, 10.0, 0.01)
PACK = {"tensor": pack_tensor, "channel": pack_channel, "block": pack_block}


def fused(
    kind: str, sizes: tuple[int, ...], k: int, device: torch.device
) -> tuple[ByteWeight, torch.Tensor, list[slice]]:
    packed = [PACK[kind](torch.randn(n, k) * f) for n, f in zip(sizes, SPREAD, strict=False)]
    shards = [
        Fp8Shard(t["weight"], next(s for leaf, s in t.items() if leaf != "weight")) for t, _ in packed
    ]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [slice(e - n, e) for e, n in zip(ends, sizes, strict=True)]
    weight = stack_shards(shards, (128, 128) if kind == "block" else None, device)
    return weight, torch.cat([w for _, w in packed]), parts


def rounded(x: torch.Tensor, block: int | None = None, scale: float | None = None) -> torch.Tensor:
    """x as e4m3 with dynamic or static scales, float32 [M, K]: the definition of rounded activations."""
    static = None if scale is None else torch.tensor([scale])
    codes, scales = quantize_rows_reference(x, encode_e4m3, 448.0, block=block, scale=static)
    width = x.shape[1] if block is None else block
    return TABLE[codes.long()] * scales.repeat_interleave(width, 1)[:, : x.shape[1]]


def hold(op: Fp8CudaLinear, x: torch.Tensor, want: torch.Tensor, parts: list[slice], limit: float) -> None:
    got = op(x).cpu()
    assert got.dtype is x.dtype
    for part in parts:
        assert relative_error(got[:, part], want[:, part]) < limit, part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize("m", [1, 20, 300])
@pytest.mark.parametrize("kind", list(PACK))
def test_weight_only(kind: str, m: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, dense, parts = fused(kind, (192, 64, 64), 320, device)
    chip = Chip.of(device)
    op = Fp8CudaLinear(weight, None, dtype, chip, native=False)
    assert op.kernel.startswith("weight-only FP8")
    x = torch.randn(m, 320).to(dtype)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    hold(op, x.to(device), x.float() @ dense.t(), parts, limit)


@pytest.mark.parametrize("native", [pytest.param(None, marks=pytest.mark.gpu, id="units"), True])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize("m", [1, 20, 130])
@pytest.mark.parametrize(
    ("kind", "sizes"), [("tensor", (192, 64, 64)), ("channel", (40, 24)), ("block", (192, 64, 64))]
)
def test_rounded_activations(
    kind: str, sizes: tuple[int, ...], m: int, dtype: torch.dtype, native: bool | None, device: torch.device
) -> None:
    weight, dense, parts = fused(kind, sizes, 320, device)
    chip = Chip.of(device)
    op = Fp8CudaLinear(weight, None, dtype, chip if native is None else replace(chip, sm=0), native=native)
    x = torch.randn(m, 320).to(dtype)
    want = rounded(x, 128 if kind == "block" else None) @ dense.t()
    hold(op, x.to(device), want, parts, 1e-2 if dtype is torch.bfloat16 else 4e-3)
    # power: unrounded activations are told apart
    with pytest.raises(AssertionError):
        hold(op, x.to(device), x.float() @ dense.t(), parts, 1e-2)


@pytest.mark.parametrize("native", [pytest.param(None, marks=pytest.mark.gpu, id="units"), True])
def test_static_scales_of_each_shard(native: bool | None, device: torch.device) -> None:
    """Shards with one scale run together, a different one runs with its own; what exceeds it saturates."""
    dtype = torch.float16
    weight, dense, parts = fused("tensor", (64, 64, 64), 320, device)
    bias = torch.randn(192).half()
    chip = Chip.of(device)
    scales = [(64, torch.tensor(0.01)), (64, torch.tensor([0.01])), (64, torch.tensor(0.003))]
    op = Fp8CudaLinear(
        weight, bias.to(device), dtype, chip if native is None else replace(chip, sm=0),
        input_scales=scales, native=native,
    )  # fmt: skip
    assert [s.rows for s in op.segments] == [slice(0, 128), slice(128, 192)]
    assert "checkpoint" in op.kernel and {"input_scale.0", "input_scale.1"} <= op.buffers().keys()
    x = torch.randn(5, 320).half()
    loose, tight = rounded(x, scale=0.01), rounded(x, scale=0.003)
    assert tight.abs().max() == pytest.approx(1.344)
    want = torch.cat([loose @ dense[:128].t(), tight @ dense[128:].t()], 1) + bias.float()
    hold(op, x.to(device), want, parts, 4e-3)
    with pytest.raises(AssertionError):
        hold(op, x.to(device), loose @ dense.t() + bias.float(), parts, 1e-2)


def test_the_mode_follows_chip_and_argument(device: torch.device) -> None:
    weight, _, _ = fused("tensor", (32,), 64, device)
    old = replace(Chip.of(device), sm=75)
    assert not Fp8CudaLinear(weight, None, torch.float16, old).native
    assert "sm_75" in Fp8CudaLinear(weight, None, torch.float16, old).kernel
    assert "asked for" in Fp8CudaLinear(weight, None, torch.float16, replace(old, sm=90), native=False).kernel
    assert "float32" in Fp8CudaLinear(weight, None, torch.float32, replace(old, sm=90)).kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=readable_id)
def test_the_library_and_the_template_agree(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 matrix units come with sm_89")
    torch.manual_seed(0)
    weight, _, _ = fused("channel", (256, 128), 512, device)
    assert fits_library(weight)
    bias = torch.randn(384, device=device)
    library, template = (Fp8CudaLinear(weight, bias, dtype, Chip.of(device)) for _ in range(2))
    template.library = False
    if dtype is torch.bfloat16:
        assert library.library and "cuBLAS" in library.kernel
    for m in (1, 7, 200):
        x = torch.randn(m, 512, device=device).to(dtype)
        assert relative_error(library(x), template(x)) < 1e-2
