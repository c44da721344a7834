"""The 8-bit by 8-bit product for a few rows of activations, bound by reading the weight.

The weight is the left operand, so that its outputs fill the matrix units' 64 rows while the activations' rows need not;
K is split among programs where outputs alone would not keep every multiprocessor reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import Chip, ceil_div, power_of_2
from qengine_kernels.overlap import overlap, wait_for_earlier
from qengine_kernels.split_k import join_parts, tickets
from qengine_kernels.w8a16_gemm.layout import ByteWeight

BLOCK_N = 64
FILL = 3
"""Programs that a multiprocessor should get."""
LEAST_INPUTS = 1024
"""Of a split."""
MOST_ROWS = 64


@dataclass(frozen=True)
class FewPlan:
    """One launch; a split takes `share` steps of block_k inputs."""

    block_m: int
    block_k: int
    num_stages: int
    tiles: int
    splits: int
    share: int


def takes_few_rows(chip: Chip, m: int, weight: ByteWeight) -> bool:
    """Whether `few_rows_matmul` serves this product: a scale a row, whole tiles, and so few rows that other kernels
    are slower (measured beside torch._scaled_mm on an H200: `benchmarks/kernels/linear.py`)."""
    n, k = weight.out_features, weight.in_features
    most = MOST_ROWS
    if n // (2 * BLOCK_N) >= chip.multiprocessors:
        most = MOST_ROWS // 2
    elif k >= 2 * n:
        most = 2 * MOST_ROWS
    whole = n % BLOCK_N == 0 and k % 128 == 0 and not weight.blocked and weight.rows is None
    return chip.tensor_cores and whole and 0 < m <= most


def plan_few(chip: Chip, m: int, n: int, in_features: int) -> FewPlan:
    block_m = min(power_of_2(m, least=16), MOST_ROWS)
    # Wide steps, unless they leave no room for loading one while another is multiplied: two programs share the memory.
    sizes = product((256, 128) if in_features % 256 == 0 else (128,), (4, 3, 2))
    room = chip.shared_memory // 2
    block_k, stages = next((size for size in sizes if shared_bytes(block_m, *size) <= room), (128, 1))
    tiles, steps = n // BLOCK_N * ceil_div(m, block_m), in_features // block_k
    want = max(1, min(FILL * chip.multiprocessors // tiles, in_features // LEAST_INPUTS))
    share = ceil_div(steps, want)
    return FewPlan(block_m, block_k, stages, tiles, ceil_div(steps, share), share)


def shared_bytes(block_m: int, block_k: int, stages: int) -> int:
    """An upper estimate: staged codes, and the float16 values that they become without matrix units for them."""
    return (stages + 2) * block_k * (BLOCK_N + block_m)


@triton.jit(do_not_specialize=["m", "share"])
def few_rows_kernel(
    p_a, p_a_scales, p_codes, p_scales, p_bias, p_out, p_parts, p_tickets, m, n, k, share,
    DOT: tl.constexpr, NATIVE: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (output tiles, splits of K). DOT(w, a, NATIVE) is the injected product of two tiles of codes, float32; its
    sums are added up here."""
    wait_for_earlier(PDL)
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    columns = n // BLOCK_N
    o_n = i_tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_tile // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_mask = o_m < m
    p_w = p_codes + o_n.to(tl.int64)[:, None] * k + o_k[None, :]
    p_x = p_a + o_m.to(tl.int64)[None, :] * k + o_k[:, None]
    begin = i_split * share
    end = tl.minimum(begin + share, k // BLOCK_K)
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.range(begin, end, num_stages=STAGES):
        b_w = tl.load(p_w + i * BLOCK_K)
        b_x = tl.load(p_x + i * BLOCK_K, mask=m_mask[None, :], other=0.0)
        b_acc += DOT(b_w, b_x, NATIVE)
    done = True
    if SPLIT:
        UNROLL: tl.constexpr = 4 if BLOCK_M <= 32 else 1
        done, b_acc = join_parts(p_parts, p_tickets, b_acc, i_tile, i_split, tl.num_programs(1), UNROLL)
    if done:
        b_y = b_acc * tl.load(p_scales + o_n)[:, None] * tl.load(p_a_scales + o_m, mask=m_mask, other=0.0)[None, :]
        if HAS_BIAS:
            b_y += tl.load(p_bias + o_n).to(tl.float32)[:, None]
        p_y = p_out + o_m.to(tl.int64)[None, :] * n + o_n[:, None]
        tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_mask[None, :])


def few_rows_matmul(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: ByteWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    dot: Any,
    native: bool,
    chip: Chip,
) -> torch.Tensor:
    """As `w8a8_matmul`, where `takes_few_rows` says so; scales float32 [M, 1]."""
    m, k = codes.shape
    n = weight.out_features
    plan = plan_few(chip, m, n, k)
    split = plan.splits > 1
    out = torch.empty((m, n), dtype=dtype, device=codes.device)
    size = plan.tiles * plan.splits * BLOCK_N * plan.block_m
    few_rows_kernel[(plan.tiles, plan.splits)](
        codes,
        scales,
        weight.codes,
        weight.scales,
        scales if bias is None else bias,
        out,
        torch.empty(size, dtype=torch.float32, device=codes.device) if split else out,
        tickets(codes.device) if split else codes,
        m,
        n,
        k,
        plan.share,
        DOT=dot,
        NATIVE=native,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        BLOCK_M=plan.block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=plan.block_k,
        STAGES=plan.num_stages,
        num_warps=4,
        num_stages=plan.num_stages,
        **overlap(codes.device),
    )
    return out
