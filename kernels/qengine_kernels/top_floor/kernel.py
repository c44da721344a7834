"""What top_k and top_p keep, found by searching for the bits of the lowest kept value: nothing is sorted.

Values are at most 0, so the bits of their magnitudes, read as integers, ascend where the values descend. Whoever stays
has at most some key; the least key under which there are enough values (top_k) or enough probability (top_p) is
searched for, each pass over the row summing under eight keys at once. The first pass tells the usual magnitudes apart,
each later one divides what is left by eight: nine passes where the answer lies between 0.25 and 16, two for a token
that is likely enough alone.

One program a row, which reads in one order: a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOP_FLOOR = {"BLOCK": 4096, "num_warps": 16}
INFINITY = tl.constexpr(0x7F800000)
"""The key of -inf."""


@triton.jit
def _key(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _sums_under(p_row, width, b_keys, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of eight keys, how many of the row's values have at most that key, or the sum of their exp (MASS)."""
    b_sums = tl.zeros([8, BLOCK], dtype=tl.float32)
    for i_start in range(0, width, BLOCK):
        o_col = i_start + tl.arange(0, BLOCK)[None, :]
        b_x = tl.load(p_row + o_col, mask=o_col < width, other=float("-inf"))
        if MASS:
            b_sums += tl.where(_key(b_x) <= b_keys[:, None], tl.exp(b_x), 0.0)
        else:
            b_sums += tl.where(_key(b_x) <= b_keys[:, None], 1.0, 0.0)
    return tl.sum(b_sums, axis=1)


@triton.jit
def _least_key(p_row, width, most, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least key, at most `most`, under which there are `wanted` values, or that share of what is under `most`."""
    o_key = tl.arange(0, 8)
    # 0, then 0.25, 0.5, 1, ... 8
    b_keys = tl.where(o_key == 7, most, tl.minimum(tl.where(o_key == 0, 0, (124 + o_key) << 23), most))
    b_sums = _sums_under(p_row, width, b_keys, MASS, BLOCK)
    if MASS:
        wanted = wanted * tl.max(b_sums, axis=0)
    too_few = tl.max(tl.where(b_sums < wanted, b_keys, -1), axis=0)
    enough = tl.min(tl.where(b_sums < wanted, most, b_keys), axis=0)
    while enough - too_few > 1:
        step = (enough - too_few + 7) // 8
        b_keys = tl.minimum(too_few + step * (o_key + 1), enough)
        b_sums = _sums_under(p_row, width, b_keys, MASS, BLOCK)
        too_few = tl.max(tl.where(b_sums < wanted, b_keys, too_few), axis=0)
        enough = tl.min(tl.where(b_sums < wanted, enough, b_keys), axis=0)
    return enough


@triton.jit
def top_floor_kernel(p_x, p_rows, p_top_k, p_top_p, p_floor, p_out, width, x_stride, BLOCK: tl.constexpr):
    """Grid (row)."""
    i_row = tl.program_id(0)
    p_row = p_x + tl.load(p_rows + i_row) * x_stride
    key = _key(tl.load(p_floor + i_row))
    top_k = tl.load(p_top_k + i_row)
    if top_k < width:
        key = tl.minimum(key, _least_key(p_row, width, INFINITY, top_k.to(tl.float32), False, BLOCK))
    top_p = tl.load(p_top_p + i_row)
    if top_p < 1.0:
        key = _least_key(p_row, width, key, top_p, True, BLOCK)
    tl.store(p_out + i_row, -key.to(tl.float32, bitcast=True))


def launch_top_floor(
    x: torch.Tensor, rows: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor
) -> torch.Tensor:
    """See `qengine_kernels.top_floor.top_floor`; V at most 2**24, which float32 counts exactly."""
    if x.dtype is not torch.float32 or x.stride(1) != 1 or x.shape[1] > 1 << 24:
        raise ValueError("top_floor needs float32 with contiguous rows of at most 2**24 values")
    out = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        top_floor_kernel[(len(rows),)](x, rows, top_k, top_p, floor, out, x.shape[1], x.stride(0), **TOP_FLOOR)
    return out
