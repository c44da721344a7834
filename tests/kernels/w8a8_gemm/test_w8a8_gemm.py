"""8-bit by 8-bit linears against float32 torch: decoded products anywhere, FP8 matrix units on GPUs that have them."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from fp8_files import TABLE, encode_e4m3
from qengine_kernels.fp8.device import e4m3_dot
from qengine_kernels.launch import Chip
from qengine_kernels.split_k import tickets
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty
from qengine_kernels.w8a8_gemm import w8a8_matmul
from qengine_kernels.w8a8_gemm.config import plan_pair, shared_bytes
from qengine_kernels.w8a8_gemm.few_rows import plan_few, takes_few_rows
from qengine_kernels.w8a8_gemm.reference import w8a8_reference
from qengine_kernels.w8a16_gemm import ByteWeight, block_scales, row_scales

NATIVE = pytest.mark.parametrize(
    "native", [pytest.param(False, id="decoded"), pytest.param(True, marks=pytest.mark.gpu, id="native")]
)
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
UNITS = 2e-3
"""Matrix units for 8-bit floats keep about 14 bits of their sums."""

# K, outputs of each stacked module, block
SHAPES = [(256, (64, 32), None), (384, (64, 64), None), (96, (9,), None), (320, (192, 64), 128), (200, (40, 24), 64)]


def case(
    k: int, parts: tuple[int, ...], block: int | None, m: int, device: torch.device, per_block: bool = True
) -> tuple[torch.Tensor, torch.Tensor, ByteWeight]:
    """Codes and scales of activations (by block where the weight's are, unless `per_block` is False), and a weight."""
    codes = encode_e4m3(torch.randn(m, k) * 40)
    columns = 1 if block is None or not per_block else -(-k // block)
    scales = torch.rand(m, columns) + 0.01
    own = encode_e4m3(torch.randn(sum(parts), k) * 40).to(device)
    if block is None:
        table = row_scales([(n, torch.rand(1) * 10.0**-i) for i, n in enumerate(parts)])
        return codes.to(device), scales.to(device), ByteWeight(own, table.to(device), None, k)
    grids = [(n, torch.rand(-(-n // block), -(-k // block)) + 0.01) for n in parts]
    table, rows = block_scales(grids, block)
    return codes.to(device), scales.to(device), ByteWeight(own, table.to(device), rows.to(device), block)


@NATIVE
@pytest.mark.parametrize(("shape", "m", "dtype"), covering(SHAPES, [1, 17, 130], [*LIMITS]))
def test_matches_reference(
    shape: tuple[int, tuple[int, ...], int | None], m: int, dtype: torch.dtype, native: bool, device: torch.device
) -> None:
    codes, scales, weight = case(*shape, m, device)
    bias = torch.randn(weight.out_features).to(dtype).to(device)
    with poisoned_empty():
        scaled = scales * 1e-3  # float16 results stay in range
        got = w8a8_matmul(codes, scaled, weight, bias, dtype, e4m3_dot, native=native)
    want = w8a8_reference(codes, scaled, weight, TABLE, bias)
    assert got.dtype == dtype
    assert_close("product", got, want, max(LIMITS[dtype], UNITS if native else 0))


@NATIVE
def test_one_scale_a_row_over_a_blocked_weight(native: bool, device: torch.device) -> None:
    codes, scales, weight = case(320, (192, 64), 128, 5, device, per_block=False)
    got = w8a8_matmul(codes, scales, weight, None, torch.float32, e4m3_dot, native=native)
    assert_close("static", got, w8a8_reference(codes, scales, weight, TABLE), UNITS if native else 1e-5)


def test_sums_do_not_depend_on_how_k_is_shared(device: torch.device) -> None:
    codes, scales, weight = case(4096, (16,), 128, 2, device)
    few, many = Chip(0, 64 * 1024, 1), Chip(0, 64 * 1024, 64)
    assert plan_pair(few, 2, 16, 4096, 128, False).splits == 2
    assert plan_pair(many, 2, 16, 4096, 128, False).splits == 8
    bias = torch.randn(16, device=device)
    want = w8a8_reference(codes, scales, weight, TABLE, bias)
    for chip in (few, many):
        with poisoned_empty():
            got = w8a8_matmul(codes, scales, weight, bias, torch.float32, e4m3_dot, native=False, chip=chip)
        assert_close("splits", got, want, 1e-5)


def test_few_rows_of_many_outputs(device: torch.device) -> None:
    """Where the chip has more multiprocessors than there are tiles, K is split; bounds of rows by shape; tickets are 0
    again after; another scale is told apart."""
    codes, scales, weight = case(4096, (64,), None, 3, device)
    scales = scales.contiguous()
    few, many = Chip(0, 64 * 1024, 1), Chip(0, 64 * 1024, 64)
    assert (plan_few(few, 3, 64, 4096).splits, plan_few(many, 3, 64, 4096).splits) == (3, 4)
    want = w8a8_reference(codes, scales, weight, TABLE)
    for chip in (few, many):
        assert takes_few_rows(chip, 3, weight) and not takes_few_rows(chip, 129, weight)
        with poisoned_empty():
            got = w8a8_matmul(codes, scales, weight, None, torch.float32, e4m3_dot, native=False, chip=chip)
        assert_close("few", got, want, 1e-5)
    assert not tickets(device).any()
    assert not takes_few_rows(Chip.known(75), 3, weight)
    with pytest.raises(KernelMismatch):
        shifted = ByteWeight(weight.codes, weight.scales * 1.5, None, 4096)
        got = w8a8_matmul(codes, scales, shifted, None, torch.float32, e4m3_dot, native=False)
        assert_close("scale", got, want, 1e-2)


def test_wrong_scales_are_told_apart(device: torch.device) -> None:
    """Controls: activation scales of the neighbouring block, and of the neighbouring row."""
    codes, scales, weight = case(320, (192, 64), 128, 5, device)
    want = w8a8_reference(codes, scales, weight, TABLE)
    for wrong in (scales.roll(1, 1), scales.roll(1, 0)):
        with pytest.raises(KernelMismatch):
            got = w8a8_matmul(codes, wrong.contiguous(), weight, None, torch.float32, e4m3_dot, native=False)
            assert_close("wrong", got, want, 1e-2)


def test_shapes_that_do_not_fit(device: torch.device) -> None:
    codes, scales, weight = case(320, (64,), 128, 5, device)
    assert w8a8_matmul(codes[:0], scales[:0], weight, None, torch.float16, e4m3_dot, native=False).shape == (0, 64)
    with pytest.raises(ValueError, match=r"\(5, 2\) do not fit a weight \[64, 320\] with 3 scales a row"):
        w8a8_matmul(codes, scales[:, :2], weight, None, torch.float16, e4m3_dot, native=False)


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
def test_plans_fit_the_chip(sm: int) -> None:
    chip = Chip.known(sm)
    for m in (1, 16, 100, 5000):
        for k, block in ((4096, 4096), (576, 128), (576, 96)):
            plan = plan_pair(chip, m, 4096, k, block, True)
            assert shared_bytes(plan.block_m, plan.block_n, plan.block_k, plan.num_stages, True) <= chip.shared_memory
            assert plan.block_k >= 32 and (block >= k or block % plan.block_k == 0)
