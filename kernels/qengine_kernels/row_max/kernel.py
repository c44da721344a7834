"""Row maxima in two launches: parts of rows, then the parts' maxima."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2

BLOCK = 4096
"""Values of a part."""


@triton.jit
def _first_max(b_x, b_place):
    """(maximum, the place of the first one); NaN counts as infinity."""
    b_x = tl.where(b_x != b_x, float("inf"), b_x)
    best = tl.max(b_x, axis=0)
    return best, tl.min(tl.where(b_x == best, b_place, 0x7FFFFFFF), axis=0)


@triton.jit
def part_max_kernel(p_x, p_best, p_place, width, x_stride, parts, BLOCK: tl.constexpr):
    """Grid (row, part)."""
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    o_col = i_part * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + i_row * x_stride + o_col, mask=o_col < width, other=float("-inf"))
    best, place = _first_max(b_x, o_col)
    tl.store(p_best + i_row * parts + i_part, best)
    tl.store(p_place + i_row * parts + i_part, place)


@triton.jit
def join_max_kernel(p_part_best, p_part_place, p_best, p_place, p_checked, parts, PARTS: tl.constexpr):
    """Grid (row)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, PARTS)
    b_best = tl.load(p_part_best + i_row * parts + o_part, mask=o_part < parts, other=float("-inf"))
    b_place = tl.load(p_part_place + i_row * parts + o_part, mask=o_part < parts, other=0x7FFFFFFF)
    best, place = _first_max(b_best, b_place)
    finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(p_best + i_row, best)
    tl.store(p_place + i_row, place.to(tl.int64))
    tl.store(p_checked + i_row, tl.where(finite, place, -1).to(tl.int64))


def launch_row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `qengine_kernels.row_max.row_max`."""
    rows, width = x.shape
    if x.dtype is not torch.float32 or x.stride(1) != 1:
        raise ValueError("row_max needs float32 with contiguous rows")
    best = torch.empty(rows, dtype=torch.float32, device=x.device)
    places = torch.empty((2, rows), dtype=torch.int64, device=x.device)
    if rows:
        parts = ceil_div(width, BLOCK)
        part_best = torch.empty((rows, parts), dtype=torch.float32, device=x.device)
        part_place = torch.empty((rows, parts), dtype=torch.int32, device=x.device)
        part_max_kernel[(rows, parts)](x, part_best, part_place, width, x.stride(0), parts, BLOCK=BLOCK, num_warps=8)
        join_max_kernel[(rows,)](
            part_best, part_place, best, places[0], places[1], parts, PARTS=power_of_2(parts), num_warps=1
        )
    return best, places[0], places[1]
