"""4-bit linears over tiles against float32 torch on codes that the test knows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from qengine_gptq.kernels import UNPACK
from qengine_kernels.launch import SHARED_MEMORY, Chip
from qengine_kernels.split_k import tickets
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id
from qengine_kernels.wna16_gemm import (
    PackedWeight,
    TiledWeight,
    held_bytes,
    held_weight,
    normal_group_size,
    pack_codes,
    to_tiles,
    wna16_matmul,
)
from qengine_kernels.wna16_gemm.tiled_config import (
    DEEP,
    NARROW,
    WIDE,
    fit,
    plan_dequantize,
    plan_tiles,
    shared_bytes,
    whole_groups,
)
from qengine_kernels.wna16_gemm.tiled_launcher import run_plan

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
# K, N, group size: several tiles a group, two groups and four slices a tile, a group a tile, one group, groups that no
# power of two divides
SHAPES = [
    (512, 128, 128), (1024, 64, 256), (384, 192, 32), (192, 64, 16), (576, 64, 64), (512, 64, -1), (256, 384, -1),
    (1152, 64, 192),
]  # fmt: skip


def weight_of(
    k: int, n: int, group_size: int, device: torch.device, zeros: bool = True, scale: torch.dtype = torch.float16
) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight and its dense float32 meaning [K, N], computed from the codes and not from the packing."""
    group = normal_group_size(group_size, k)
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    zero = torch.randint(0, 16, (k // group, n), dtype=torch.uint8)
    scales = (torch.rand(k // group, n) * 0.05 + 0.01).to(scale)
    row = torch.arange(k) // group
    dense = (codes.float() - (zero.float()[row] if zeros else 8)) * scales.float()[row]
    zero_or_none = zero.to(device) if zeros else None
    packed = PackedWeight(pack_codes(codes.to(device)), scales.to(device), zero_or_none, k, group)
    return packed, dense.to(device)


def multiply(
    x: torch.Tensor, weight: PackedWeight | TiledWeight, bias: torch.Tensor | None, chip: Chip | None = None
) -> torch.Tensor:
    with poisoned_empty():
        return wna16_matmul(x, weight, bias, UNPACK[4], chip)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize("m", [1, 9, 20, 70, 300, 600])
@pytest.mark.parametrize("shape", SHAPES, ids=readable_id)
def test_tiles_match_reference(
    shape: tuple[int, int, int], m: int, dtype: torch.dtype, device: torch.device
) -> None:
    packed, dense = weight_of(*shape, device, zeros=m != 9)
    weight = to_tiles(packed)
    assert isinstance(held_weight(packed, dtype, Chip.of(device)), TiledWeight)
    x = torch.randn(m, shape[0]).to(dtype).to(device)
    bias = torch.randn(shape[1]).to(dtype).to(device)
    got = multiply(x, weight, bias)
    assert got.dtype == dtype
    want = x.float() @ dense + bias.float()
    assert_close("tiles", got, want, LIMITS[dtype])
    for name, wrong in (("a column further", dense.roll(1, 1)), ("a slice further", dense.roll(16, 0))):
        with pytest.raises(KernelMismatch):
            assert_close(name, got, x.float() @ wrong + bias.float(), 0.1)


@pytest.mark.parametrize("m", [5, 16, 31, 64, 128, 300])
@pytest.mark.parametrize(("multiprocessors", "k", "group"), [(1, 512, 256), (1, 512, 128), (64, 1024, 128)])
def test_every_entry_of_the_tables(m: int, multiprocessors: int, k: int, group: int, device: torch.device) -> None:
    """A chip with one multiprocessor takes wide outputs whole, one with many splits K; tickets are 0 again after. sm_90
    has the kernel of test_paired_gemm.py for many rows."""
    packed, dense = weight_of(k, 384, group, device)
    weight, chip = to_tiles(packed), Chip(100, 227 * 1024, multiprocessors)
    plan = plan_tiles(chip, m, 384, k, group)
    assert plan.kind in ("few", "many") and (plan.splits > 1) == (multiprocessors > 1)
    x = torch.randn(m, k, device=device).half()
    assert_close("entry", multiply(x, weight, None, chip), x.float() @ dense, LIMITS[torch.float16])
    assert not tickets(device).any()


@pytest.mark.parametrize("chunk", [0, 64, 128])
def test_dequantised_some_outputs_at_a_time(chunk: int, device: torch.device) -> None:
    packed, dense = weight_of(256, 320, 64, device)
    x, bias = torch.randn(40, 256, device=device).half(), torch.randn(320, device=device).half()
    with poisoned_empty():
        got = run_plan(x, to_tiles(packed), bias, plan_dequantize(256, 64, chunk))
    assert_close("chunks", got, x.float() @ dense + bias.float(), LIMITS[torch.float16])
    with pytest.raises(KernelMismatch):
        assert_close("chunks", got, x.float() @ dense.roll(64, 1) + bias.float(), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [-1, 32])
def test_a_long_k_gives_the_same_bits_each_time(group: int) -> None:
    """Many steps on a full chip, whole outputs and split ones: where a product and the next step's decoding get in each
    other's way, it is by chance."""
    device = torch.device("cuda")
    packed, dense = weight_of(4096, 2048, group, device)
    weight = to_tiles(packed)
    for multiprocessors, m in product((1, 132), (16, 64, 128, 512)):
        chip = replace(Chip.of(device), multiprocessors=multiprocessors)
        x = torch.randn(m, 4096, device=device, dtype=torch.bfloat16)
        first = multiply(x, weight, None, chip)
        assert_close(f"{m} rows", first, x.float() @ dense, LIMITS[torch.bfloat16])
        assert all(torch.equal(first, multiply(x, weight, None, chip)) for _ in range(20)), (multiprocessors, m)


def test_parts_keep_to_groups() -> None:
    """Columns of words in a part and parts in a step; 4 inputs a column."""
    wanted = {
        (64, 4096, 128): (32, 2), (64, 4096, 0): (64, 1), (64, 4096, 64): (16, 2), (32, 4096, 128): (32, 1),
        (64, 576, 64): (16, 1), (64, 1152, 192): (16, 2), (64, 4096, 32): (16, 2), (16, 4096, 32): (16, 1),
    }  # fmt: skip
    assert {case: whole_groups(*case, 2) for case in wanted} == wanted
    assert whole_groups(64, 4096, 64, 1) == (16, 1)


def test_narrow_scales_and_strided_rows(device: torch.device) -> None:
    """bfloat16 scales, which compressed-tensors writes; x is a part of a wider tensor."""
    packed, dense = weight_of(256, 128, 128, device, scale=torch.bfloat16)
    wide = torch.randn(3, 600, device=device).half()
    x = wide[:, 16:272]
    assert_close("bf16 scales", multiply(x, to_tiles(packed), None), x.float() @ dense, LIMITS[torch.float16])


def test_order_by_definition() -> None:
    """Every code lies where the layout's description says, and comes back from there."""
    k, n = 192, 128
    packed, _ = weight_of(k, n, 64, torch.device("cpu"))
    weight = to_tiles(packed)
    codes = weight.codes()
    assert torch.equal(pack_codes(codes), packed.words)
    words = weight.words.view(n // 64, k // 64, -1)
    for output, column in product((0, 9, 70, 127), range(0, 16, 3)):
        h, t, b = column // 8, column % 8 // 2, column % 2
        w, r, g = output % 64 // 16, output % 16 // 8, output % 8
        place = (((((w * 8 + g) * 4 + t) * 2 + h) * 2 + r) * 2) + b
        word = int(words[output // 64, 1, place]) & 0xFFFF
        rows = [64 + 16 * s + column for s in range(4)]
        assert [word >> 4 * s & 15 for s in range(4)] == codes[rows, output].tolist()
    back = weight.packed()
    assert torch.equal(back.words, packed.words) and torch.equal(back.scales, packed.scales)
    assert packed.zeros is not None and back.zeros is not None and torch.equal(back.zeros, packed.zeros)


def test_what_is_held_where() -> None:
    packed, _ = weight_of(512, 128, 128, torch.device("cpu"))
    hopper, turing = Chip.known(90), Chip.known(75)
    for dtype, chip, kind in (
        (torch.float16, hopper, TiledWeight), (torch.float16, turing, PackedWeight),
        (torch.float32, hopper, PackedWeight),
    ):  # fmt: skip
        held = held_weight(packed, dtype, chip)
        assert type(held) is kind
        assert held_bytes(512, 128, 128, True, dtype, chip) == sum(t.nbytes for t in held.buffers().values())
    assert held_bytes(512, 128, 128, True, torch.float16, hopper, tiles=False) == sum(
        t.nbytes for t in packed.buffers().values()
    )
    odd, _ = weight_of(200, 64, 40, torch.device("cpu"))
    assert held_weight(odd, torch.float16, hopper) is odd
    with pytest.raises(ValueError, match="has no tiles"):
        to_tiles(odd)


def test_entries_fit_every_chip() -> None:
    for sm, entry in product(SHARED_MEMORY, (*WIDE, *NARROW, *DEEP)):
        chip = Chip.known(sm)
        assert shared_bytes(fit(chip, entry)) <= chip.shared_memory, (sm, entry)
    assert fit(Chip.known(90), WIDE[-1]) == WIDE[-1]
