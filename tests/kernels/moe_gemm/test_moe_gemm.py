"""The grouped GEMM of experts against float32 torch, for weights in words, bytes and floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from qengine_awq.kernels import unpack_nibble
from qengine_dense.kernels import identity_decode
from qengine_kernels.fp8.device import e4m3_decode
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm import (
    ByteExperts,
    DenseExperts,
    ExpertWeights,
    PackedExperts,
    Stack,
    grouped_matmul,
    most_pairs,
)
from qengine_kernels.moe_gemm.config import GroupedPlan, plan_grouped, row_tiles
from qengine_kernels.moe_gemm.launcher import launch_grouped
from qengine_kernels.moe_gemm.reference import grouped_reference
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id
from qengine_kernels.w8a16_gemm import ByteWeight
from qengine_kernels.wna16_gemm import PackedWeight, pack_codes

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXPERTS = 6


@dataclass
class Case:
    """Weights as the kernel reads them, the device function, and what they mean: float32 [E, N, K]."""

    weights: ExpertWeights
    unpack: Any
    dense: torch.Tensor


def packed_case(
    k: int, n: int, group: int, device: torch.device, zeros: bool = True, shuffled: bool = False, experts: int = EXPERTS
) -> Case:
    stack, meaning = PackedExperts(experts), []
    for e in range(experts):
        codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
        zero = torch.randint(0, 16, (-(-k // group), n), dtype=torch.uint8)
        scales = (torch.rand(-(-k // group), n) * 0.05 + 0.01).half()
        row = torch.arange(k) // group
        dense = (codes.float() - (zero.float()[row] if zeros else 8.0)) * scales.float()[row]
        columns = torch.randperm(k).int() if shuffled else None
        packed = PackedWeight(
            pack_codes(codes.to(device)), scales.to(device), zero.to(device) if zeros else None, k, min(group, k)
        )
        stack.put(e, packed, None if columns is None else columns.to(device))
        if columns is not None:
            dense = torch.empty_like(dense).index_copy_(0, columns.long(), dense)
        meaning.append(dense.t())
    return Case(stack.weights, unpack_nibble, torch.stack(meaning).to(device))


def dense_case(k: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    stack = DenseExperts(EXPERTS)
    dense = torch.randn(EXPERTS, n, k).to(dtype) / k**0.5
    for e in range(EXPERTS):
        stack.put(e, dense[e].to(device))
    return Case(stack.weights, identity_decode, dense.float().to(device))


def byte_case(k: int, n: int, block: tuple[int, int] | None, device: torch.device) -> Case:
    """e4m3 weights with a scale for each row, or for each block; a block of outputs may be short."""
    stack, meaning = ByteExperts(EXPERTS), []
    for e in range(EXPERTS):
        stored = torch.randn(n, k).to(torch.float8_e4m3fn)
        row = torch.arange(n) // (block[0] if block else 1)
        block_k = block[1] if block else k
        scales = torch.rand(int(row[-1]) + 1, -(-k // block_k)) + 0.5
        rows = row.int().to(device) if block else None
        stack.put(e, ByteWeight(stored.view(torch.uint8).to(device), scales.to(device), rows, block_k))
        meaning.append(stored.float() * scales[row][:, torch.arange(k) // block_k])
    return Case(stack.weights, e4m3_decode, torch.stack(meaning).to(device))


def routed(
    tokens: int, top_k: int, device: torch.device, experts: int = EXPERTS, busy: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """order, offsets and weights of random pairs; experts from `busy` on get none."""
    chosen = torch.stack([torch.randperm(busy or experts)[:top_k] for _ in range(tokens)]).flatten()
    ids, order = chosen.sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(experts + 1), out_int32=True)
    return order.to(device), offsets.to(device), torch.rand(tokens * top_k).to(device)


def check(
    case: Case, tokens: int, top_k: int, dtype: torch.dtype, device: torch.device, busy: int | None = None
) -> None:
    """Both directions; the weights of the next expert, and weightless sums, must miss."""
    order, offsets, weights = routed(tokens, top_k, device, case.weights.num_experts, busy)
    k = case.weights.in_features
    x = torch.randn(tokens, k).to(dtype).to(device)
    with poisoned_empty():
        up = grouped_matmul(x, case.weights, order, offsets, top_k, case.unpack)
    assert up.dtype == dtype
    assert_close("up", up, grouped_reference(x, case.dense, order, offsets, top_k), LIMITS[dtype])
    rows = torch.randn(tokens * top_k, k).to(dtype).to(device)
    with poisoned_empty():
        down = grouped_matmul(rows, case.weights, order, offsets, top_k, case.unpack, weights)
    assert_close("down", down, grouped_reference(rows, case.dense, order, offsets, top_k, weights), LIMITS[dtype])
    wrong = {
        "next expert": (up, grouped_reference(x, case.dense.roll(1, 0), order, offsets, top_k)),
        "order of pairs": (up, grouped_reference(x.roll(1, 0), case.dense, order, offsets, top_k)),
        "no weights": (down, grouped_reference(rows, case.dense, order, offsets, top_k, torch.ones_like(weights))),
    }
    if tokens == 1:
        del wrong["order of pairs"]
    for name, (got, other) in wrong.items():
        with pytest.raises(KernelMismatch):
            assert_close(name, got, other, 10 * max(LIMITS.values()))


# tokens, top_k, dtype: one token, a few (multiplied and added), tiles of 16 and of 64 rows with short ones
CALLS = [(1, 3, torch.float32), (4, 2, torch.float16), (9, 2, torch.float32), (70, 3, torch.float16)] + [
    pytest.param(*call, torch.bfloat16, marks=pytest.mark.gpu) for call in ((1, 3), (4, 2), (9, 2), (70, 3))
]


@pytest.mark.parametrize(("tokens", "top_k", "dtype"), CALLS, ids=readable_id)
@pytest.mark.parametrize("shape", [(128, 72, 64), (77, 24, 30)], ids=readable_id)
def test_packed_words(
    shape: tuple[int, int, int], tokens: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(packed_case(*shape, device), tokens, top_k, dtype, device)


@pytest.mark.parametrize(("tokens", "top_k", "dtype"), CALLS, ids=readable_id)
def test_dense_floats(tokens: int, top_k: int, dtype: torch.dtype, device: torch.device) -> None:
    check(dense_case(100, 72, dtype, device), tokens, top_k, dtype, device)


@pytest.mark.parametrize(("tokens", "top_k", "dtype"), CALLS, ids=readable_id)
@pytest.mark.parametrize("block", [None, (32, 64)], ids=readable_id)
def test_bytes_with_scales(
    block: tuple[int, int] | None, tokens: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(byte_case(160, 40, block, device), tokens, top_k, dtype, device)


@pytest.mark.parametrize("tokens", [2, 20])
def test_without_zeros_and_with_shuffled_inputs(tokens: int, device: torch.device) -> None:
    check(packed_case(64, 40, 32, device, zeros=False), tokens, 2, torch.float32, device)
    check(packed_case(128, 40, 32, device, shuffled=True), tokens, 2, torch.float32, device)


def test_idle_experts_and_lone_ones(device: torch.device) -> None:
    """Only the first three of six experts get tokens; then one expert gets all; then 5 of 40 exist in a step."""
    case = dense_case(64, 32, torch.float32, device)
    check(case, 20, 2, torch.float32, device, busy=3)
    check(case, 33, 1, torch.float32, device, busy=1)
    check(packed_case(32, 16, 32, device, experts=40), 5, 1, torch.float32, device)


@pytest.mark.parametrize(("dot", "block_m"), [(False, 1), (False, 4), (True, 16)])
def test_any_tile_of_rows(dot: bool, block_m: int, device: torch.device) -> None:
    """Also what no plan takes for this many rows: many small tiles for one expert."""
    case = packed_case(128, 40, 64, device)
    order, offsets, _ = routed(11, 2, device, busy=3)
    x = torch.randn(11, 128, device=device)
    plan = GroupedPlan(dot, block_m, 32, 16, 4, 1)
    with poisoned_empty():
        got = launch_grouped(x, case.weights, order, offsets, 2, case.unpack, plan=plan)
    assert_close("tiles", got, grouped_reference(x, case.dense, order, offsets, 2), 1e-5)


def test_tiles_suffice_for_every_split_of_the_pairs() -> None:
    for experts, pairs, block_m in ((8, 20, 4), (3, 7, 16), (5, 5, 1), (64, 9, 2)):
        for seed in range(50):
            generator = torch.Generator().manual_seed(seed)
            counts = torch.randint(0, experts, (pairs,), generator=generator).bincount(minlength=experts)
            needed = int((-(-counts // block_m)).sum())
            assert needed <= row_tiles(pairs, experts, block_m)
    assert row_tiles(20, 8, 4) == 3 + 8  # reached: seven experts have 1 row, one has 13


def test_plans() -> None:
    hopper, turing = Chip.known(90, 132), Chip.known(75, 40)

    def plan(chip: Chip, tokens: int, slots: int = 8, group: int | None = None) -> GroupedPlan:
        return plan_grouped(chip, tokens * 8, 8, 128, 1536, slots, 2, 4 if slots == 8 else 2, group)

    assert [plan(hopper, t).dot for t in (1, 4, 5, 4000)] == [False, False, True, True]
    assert not any(plan(turing, t, s).dot for t in (1, 64, 4000) for s in (1, 8))
    assert [plan(hopper, t).block_m for t in (1, 3, 16, 1000, 4000)] == [1, 4, 16, 64, 64]
    # of single elements a tile lies within one group of scales, unless that would be a sliver
    assert [plan(hopper, 1, 1, g).block_w for g in (None, 128, 96, 40)] == [256, 128, 32, 256]
    assert [plan(hopper, 100, 1, g).block_w for g in (None, 128, 32)] == [64, 64, 32]
    assert most_pairs(hopper, 128) == 128 * 256 and most_pairs(turing, 8) == 128


def test_stack_holds_what_it_was_given() -> None:
    stack = Stack(3)
    views = [stack.put(i, {"a": torch.full((2,), i), "b": torch.full((1, 2), 10 * i)}) for i in range(3)]
    assert stack.tensors["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert views[1]["b"].data_ptr() == stack.tensors["b"][1].data_ptr()
    for unlike in ({"a": torch.zeros(2)}, {"a": torch.zeros(1), "b": torch.zeros(1, 2)}):
        with pytest.raises(ValueError, match=r"expert 2 is stored unlike the others: have .*need a int64 \[2\], b"):
            stack.put(2, unlike)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    case = dense_case(32, 16, torch.float32, device)
    order, offsets, weights = routed(4, 2, device)
    with pytest.raises(ValueError, match=r"\(8, 32\).*need \(4, 32\)"):
        grouped_matmul(torch.zeros(8, 32, device=device), case.weights, order, offsets, 2, case.unpack)
    with pytest.raises(ValueError, match="need \\(8, 32\\)"):
        grouped_matmul(torch.zeros(4, 32, device=device), case.weights, order, offsets, 2, case.unpack, weights)
    with pytest.raises(ValueError, match="5 experts for the weights of 6"):
        grouped_matmul(torch.zeros(4, 32, device=device), case.weights, order, offsets[1:], 2, case.unpack)
    none = grouped_matmul(torch.zeros(0, 32, device=device), case.weights, order[:0], offsets * 0, 2, case.unpack)
    assert none.shape == (0, 16)
