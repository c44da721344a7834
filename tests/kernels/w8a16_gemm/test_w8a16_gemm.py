"""8-bit weight-only linears against float32 torch, on e4m3 codes whose values the test knows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from covering import covering
from fp8_files import TABLE, encode_e4m3
from qengine_kernels.fp8.device import e4m3_decode_finite
from qengine_kernels.launch import Chip
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty
from qengine_kernels.w8a16_gemm import ByteWeight, block_scales, byte_weight_bytes, row_scales, w8a16_matmul
from qengine_kernels.w8a16_gemm.config import plan_bytes, shared_bytes
from qengine_kernels.w8a16_gemm.reference import dequantize_reference

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ROWS = {"gemv": (1, 5), "gemm": (17, 70), "dequantize": (5, 40)}
"""Rows of x for each route: one tile and several."""

# K, outputs of each stacked module, block: scales a row; partial blocks at the end and between modules; odd sizes
SHAPES = [(256, (64, 32), None), (77, (9,), None), (320, (192, 64), 128), (200, (40, 24), 64), (96, (130,), 32)]


def weight_of(
    k: int, parts: tuple[int, ...], block: int | None, device: torch.device
) -> tuple[ByteWeight, torch.Tensor]:
    """A weight and its float32 meaning [N, K], computed module by module from the codes."""
    shards, dense = [], []
    for i, n in enumerate(parts):
        codes = encode_e4m3(torch.randn(n, k) * 40)
        if block is None:
            scale = torch.rand(n, 1) + 0.01
            expanded = scale
        else:
            scale = torch.rand(-(-n // block), -(-k // block)) + 0.01
            expanded = scale[torch.arange(n) // block][:, torch.arange(k) // block]
        shards.append((n, scale * 10.0**-i, codes))
        dense.append(TABLE[codes.long()] * expanded * 10.0**-i)
    codes = torch.cat([c for _, _, c in shards]).to(device)
    scales = [(n, s) for n, s, _ in shards]
    if block is None:
        weight = ByteWeight(codes, row_scales(scales).to(device), None, k)
    else:
        table, rows = block_scales(scales, block)
        weight = ByteWeight(codes, table.to(device), rows.to(device), block)
    return weight, torch.cat(dense).to(device)


@pytest.mark.parametrize(("shape", "route", "tiles", "dtype"), covering(SHAPES, [*ROWS], (0, 1), [*LIMITS]))
def test_matches_reference(
    shape: tuple[int, tuple[int, ...], int | None], route: str, tiles: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight, dense = weight_of(*shape, device)
    m = ROWS[route][tiles]
    x = torch.randn(m, shape[0]).to(dtype).to(device)
    bias = torch.randn(len(dense)).to(dtype).to(device)
    with poisoned_empty():
        got = w8a16_matmul(x, weight, bias, e4m3_decode_finite, route=route)  # type: ignore[arg-type]
    assert got.dtype == dtype
    want = x.float() @ dense.t() + bias.float()
    first = 0
    for n in shape[1]:  # a module that is a thousandth of its neighbour counts as much
        part = slice(first, first + n)
        assert_close(f"{route} {part}", got[:, part], want[:, part], LIMITS[dtype])
        first += n


@pytest.mark.parametrize("route", ["gemv", "gemm", "dequantize"])
def test_wrong_scales_are_told_apart(route: str, device: torch.device) -> None:
    """Controls: one scale for all stacked modules; blocks counted through the stack as if no module ended in a short
    one; a grid's rows and columns shifted."""
    weight, dense = weight_of(320, (192, 64, 64), 128, device)
    x = torch.randn(3, 320, device=device)
    want = x @ dense.t()
    through = (torch.arange(320, dtype=torch.int32) // 128).to(device)
    wrong = [
        dataclasses.replace(weight, scales=torch.full_like(weight.scales, weight.scales.max().item())),
        dataclasses.replace(weight, rows=through),
        dataclasses.replace(weight, scales=weight.scales.roll(1, 1)),
    ]
    assert_close("right", w8a16_matmul(x, weight, None, e4m3_decode_finite, route=route), want, 1e-5)  # type: ignore[arg-type]
    for other in wrong:
        with pytest.raises(KernelMismatch):
            got = w8a16_matmul(x, other, None, e4m3_decode_finite, route=route)  # type: ignore[arg-type]
            assert_close("wrong", got, want, 1e-2)


@triton.jit
def int8_decode(codes, NATIVE: tl.constexpr):
    return codes.to(tl.int8, bitcast=True).to(tl.float16)


def test_another_format_brings_its_decoder(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(4, 64).to(device)
    weight = ByteWeight(codes, torch.ones(4, 1, device=device), None, 64)
    got = w8a16_matmul(torch.eye(64, device=device), weight, None, int8_decode)
    assert torch.equal(got.t(), codes.view(torch.int8).float())


def test_reference_and_bytes(device: torch.device) -> None:
    for shape in SHAPES:
        weight, dense = weight_of(*shape, device)
        assert_close("reference", dequantize_reference(weight, TABLE), dense, 1e-6)
        block = None if shape[2] is None else (shape[2], shape[2])
        held = sum(t.numel() * t.element_size() for t in weight.buffers().values())
        assert byte_weight_bytes(*dense.shape, block) <= held <= byte_weight_bytes(*dense.shape, block) + 64
        assert held < 1.06 * dense.numel()


def test_long_batches_go_in_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    import qengine_kernels.w8a16_gemm.launcher as launcher

    weight, dense = weight_of(200, (40, 56), 64, device)
    monkeypatch.setattr(launcher, "SCRATCH_BYTES", 200 * 32 * 4)
    x, bias = torch.randn(3, 200, device=device), torch.randn(96, device=device)
    with poisoned_empty():
        got = w8a16_matmul(x, weight, bias, e4m3_decode_finite, route="dequantize")
    assert_close("chunks", got, x @ dense.t() + bias, 1e-5)
    assert w8a16_matmul(x[:0], weight, bias, e4m3_decode_finite).shape == (0, 96)


def test_shapes_that_do_not_fit() -> None:
    codes = torch.zeros(8, 256, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\(8, 2\); need \(8, 1\)"):
        ByteWeight(codes, torch.ones(8, 2), None, 256)
    with pytest.raises(ValueError, match="multiple of 32"):
        ByteWeight(codes, torch.ones(8, 6), None, 48)
    weight = ByteWeight(codes, torch.ones(8, 1), None, 256)
    with pytest.raises(ValueError, match="128 columns, the weight 256"):
        w8a16_matmul(torch.zeros(1, 128), weight, None, e4m3_decode_finite)


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_plans_fit_the_chip(sm: int) -> None:
    chip = Chip.known(sm)
    for m in (1, 4, 16, 17, 200, 5000):
        for k, block in ((4096, 4096), (576, 128), (576, 96), (14336, 128)):
            plan = plan_bytes(chip, m, 4096, k, block, 2)
            assert block >= k or block % plan.block_k == 0
            if plan.route == "gemm":
                assert shared_bytes(plan.block_m, plan.block_n, plan.block_k, plan.num_stages, 2) <= chip.shared_memory
            if plan.route != "dequantize":
                tiles = -(-k // plan.block_k)
                assert (plan.splits - 1) * plan.share < tiles <= plan.splits * plan.share
    assert plan_bytes(chip, 17, 4096, 4096, 4096, 2).route == ("dequantize" if sm == 75 else "gemm")
