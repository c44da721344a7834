"""4-bit linears against float32 torch on codes that the test knows."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from qengine_gptq.kernels import UNPACK
from qengine_kernels.launch import Chip
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty
from qengine_kernels.wna16_gemm import (
    PackedWeight,
    normal_group_size,
    pack_codes,
    packed_bytes,
    unpack_words,
    wna16_matmul,
)
from qengine_kernels.wna16_gemm.config import grouping, plan_gemm
from qengine_kernels.wna16_gemm.launcher import dequantize
from qengine_kernels.wna16_gemm.reference import dequantize_reference, wna16_reference

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

DTYPES = list(LIMITS)
ROWS = {"gemv": (1, 3), "gemm": (17, 70), "dequantize": (5, 40)}
"""Rows of x for each route: one tile and several."""

# K, N, group size: plain, narrow slices, one group, ragged last group, group smaller than a slice tile, K not % 8
SHAPES = [(256, 128, 128), (576, 72, 64), (192, 64, -1), (96, 8, 64), (200, 136, 32), (128, 40, 16), (77, 64, 30)]


def weight_of(
    k: int, n: int, group_size: int, device: torch.device, zeros: bool = True, bits: int = 4
) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight and its dense float32 meaning [K, N], computed from the codes and not from the packing."""
    group = normal_group_size(group_size, k)
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits, (k, n), dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (groups, n), dtype=torch.uint8)
    middle = 1 << (bits - 1)
    scales = (torch.rand(groups, n) * 0.05 + 0.01).half()
    row = torch.arange(k) // group
    dense = (codes.float() - (zero.float()[row] if zeros else middle)) * scales.float()[row]
    zero_or_none = zero.to(device) if zeros else None
    packed = PackedWeight(pack_codes(codes.to(device), bits), scales.to(device), zero_or_none, k, group, middle, bits)
    return packed, dense.to(device)


@pytest.mark.parametrize(("shape", "route", "tiles", "dtype"), covering(SHAPES, [*ROWS], (0, 1), DTYPES))
def test_matches_reference(
    shape: tuple[int, int, int], route: str, tiles: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight, dense = weight_of(*shape, device)
    m = ROWS[route][tiles]
    x = torch.randn(m, shape[0]).to(dtype).to(device)
    bias = torch.randn(shape[1]).to(dtype).to(device)
    with poisoned_empty():
        got = wna16_matmul(x, weight, bias, UNPACK[weight.bits], route=route)  # type: ignore[arg-type]
    assert got.dtype == dtype
    assert_close(route, got, x.float() @ dense + bias.float(), LIMITS[dtype])


# bits, K, N, group size, and how often scales change: every grouping of the kernels for 2 and 8 bits
OTHER_BITS = [
    (2, 512, 72, 256, 0), (2, 192, 64, 128, 1), (2, 512, 40, 32, 2), (2, 256, 64, 128, 2), (2, 200, 40, 24, 3),
    (2, 77, 64, -1, 0), (8, 256, 72, 128, 0), (8, 96, 64, 32, 1), (8, 128, 40, 32, 2), (8, 200, 40, 24, 1),
    (8, 77, 64, 30, 3), (4, 256, 64, 64, 2),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "route", "dtype"), covering(OTHER_BITS, [*ROWS], DTYPES))
def test_other_bits(
    shape: tuple[int, int, int, int, int], route: str, dtype: torch.dtype, device: torch.device
) -> None:
    bits, k, n, group_size, expected = shape
    m = {"gemv": 3, "gemm": 17, "dequantize": 5}[route]
    weight, dense = weight_of(k, n, group_size, device, zeros=route != "gemm", bits=bits)
    assert grouping(weight.group_size, k, weight.slice_rows, 16, weight.slots) == expected
    x = torch.randn(m, k).to(dtype).to(device)
    with poisoned_empty():
        got = wna16_matmul(x, weight, None, UNPACK[bits], route=route)  # type: ignore[arg-type]
    assert_close(route, got, x.float() @ dense, LIMITS[dtype])
    with pytest.raises(KernelMismatch):
        assert_close("one group further", got, x.float() @ dense.roll(1, 1), 0.1)


@pytest.mark.parametrize("route", ["gemv", "gemm", "dequantize"])
def test_without_zeros_and_bias_the_zero_is_8(route: str, device: torch.device) -> None:
    weight, dense = weight_of(200, 64, 64, device, zeros=False)
    x = torch.randn(4, 200, device=device)
    with poisoned_empty():
        got = wna16_matmul(x, weight, None, UNPACK[weight.bits], route=route)  # type: ignore[arg-type]
    assert_close(route, got, x @ dense, 1e-5)
    with pytest.raises(KernelMismatch):
        assert_close("zero 7", got, x @ (dense + weight.scales.float()[torch.arange(200) // 64]), 1e-2)


@pytest.mark.parametrize(
    ("route", "multiprocessors", "splits"), [("gemm", 1, 2), ("gemv", 1, 4), ("gemv", 64, 5), ("gemm", 64, 5)]
)
def test_any_split_of_k(route: str, multiprocessors: int, splits: int, device: torch.device) -> None:
    """A chip with more multiprocessors cuts K finer; the last split is short (149 word rows)."""
    chip = Chip(80, 163 * 1024, multiprocessors)
    assert plan_gemm(chip, 2, 64, 1192, 4, route).splits == splits  # type: ignore[arg-type]
    weight, dense = weight_of(1192, 64, 32, device)
    x, bias = torch.randn(2, 1192, device=device), torch.randn(64, device=device)
    with poisoned_empty():
        got = wna16_matmul(x, weight, bias, UNPACK[weight.bits], chip, route)  # type: ignore[arg-type]
    assert_close("split", got, x @ dense + bias, 1e-5)


def test_dequantises_any_columns(device: torch.device) -> None:
    weight, dense = weight_of(136, 200, 24, device)
    plan = plan_gemm(Chip.known(90), 1000, 200, 136, 2)
    assert plan.route == "dequantize"
    out = torch.full((136, 72), float("nan"), device=device)
    dequantize(weight, UNPACK[weight.bits], out, 64, plan)
    assert torch.equal(out, dense[:, 64:136])


def test_chunks_of_columns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch too small for the whole weight: 64 columns at a time, the last chunk short."""
    monkeypatch.setattr("qengine_kernels.wna16_gemm.launcher.SCRATCH_BYTES", 200 * 64 * 4)
    weight, dense = weight_of(200, 136, 32, device)
    x, bias = torch.randn(40, 200, device=device), torch.randn(136, device=device)
    with poisoned_empty():
        got = wna16_matmul(x, weight, bias, UNPACK[weight.bits], Chip.known(75))
    assert_close("chunks", got, x @ dense + bias, 1e-5)


def test_routes_by_chip() -> None:
    def routes(chip: Chip) -> list[str]:
        return [plan_gemm(chip, m, 4096, 4096, 2).route for m in (1, 4, 5, 16, 17, 256, 257)]

    assert routes(Chip.known(75)) == ["gemv"] * 4 + ["dequantize"] * 3
    assert routes(Chip.known(90)) == ["gemv"] * 2 + ["gemm"] * 4 + ["dequantize"]


def test_strided_and_empty_x(device: torch.device) -> None:
    weight, dense = weight_of(64, 32, 32, device)
    wide = torch.randn(3, 200, device=device)
    assert_close("rows", wna16_matmul(wide[:, 8:72], weight, None, UNPACK[weight.bits]), wide[:, 8:72] @ dense, 1e-5)
    columns = torch.randn(64, 3, device=device).T
    assert_close("columns", wna16_matmul(columns, weight, None, UNPACK[weight.bits]), columns @ dense, 1e-5)
    assert wna16_matmul(wide[:0, :64], weight, None, UNPACK[weight.bits]).shape == (0, 32)
    with pytest.raises(ValueError, match="200 columns, the weight 64 rows"):
        wna16_matmul(wide, weight, None, UNPACK[weight.bits])


@pytest.mark.parametrize("k", [8, 77, 200, 576, 1024])
def test_packing_round_trip_and_bytes(k: int) -> None:
    codes = torch.randint(0, 16, (k, 24), dtype=torch.uint8)
    words = pack_codes(codes)
    assert torch.equal(unpack_words(words, k), codes)
    weight, dense = weight_of(k, 24, 32, torch.device("cpu"))
    assert torch.equal(dequantize_reference(weight), dense)
    held = [weight.words, weight.scales, weight.zeros]
    for bits in (2, 8):
        codes = torch.randint(0, 1 << bits, (k, 24), dtype=torch.uint8)
        assert torch.equal(unpack_words(pack_codes(codes, bits), k, bits), codes)
    with pytest.raises(ValueError, match="3 bits"):
        pack_codes(codes, 3)
    assert packed_bytes(k, 24, min(32, k), True) == sum(t.numel() * t.element_size() for t in held if t is not None)


def test_wrong_readings_fail() -> None:
    """Control: shifted zeros, swapped nibble order and the wrong group are all outside the limits."""
    weight, dense = weight_of(128, 64, 32, torch.device("cpu"))
    x = torch.randn(8, 128)
    want = x @ dense
    assert_close("right", wna16_reference(x, weight), want, 1e-5)
    zeros = weight.zeros
    assert zeros is not None
    swapped = ((weight.words & 0x0F0F0F0F) << 4) | ((weight.words >> 4) & 0x0F0F0F0F)
    for name, wrong in (
        ("zero", PackedWeight(weight.words, weight.scales, zeros + 1, 128, 32)),
        ("nibble", PackedWeight(swapped, weight.scales, zeros, 128, 32)),
        ("group", PackedWeight(weight.words, weight.scales.roll(1, 0), zeros.roll(1, 0), 128, 32)),
    ):
        with pytest.raises(KernelMismatch):
            assert_close(name, wna16_reference(x, wrong), want, max(LIMITS.values()))


def test_senseless_group_sizes_are_refused() -> None:
    assert (normal_group_size(-1, 64), normal_group_size(128, 64), normal_group_size(32, 64)) == (64, 64, 32)
    for bad in (0, -2):
        with pytest.raises(ValueError, match=str(bad)):
            normal_group_size(bad, 64)
