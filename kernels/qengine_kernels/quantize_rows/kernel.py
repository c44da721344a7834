"""Activation quantisation: one program a row, or a row's block."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2
from qengine_kernels.overlap import overlap, wait_for_earlier

WIDEST = 4096
"""Columns that a program holds at a time; longer rows are read twice."""


def quantize_rows_config(width: int) -> dict[str, int]:
    """Block and warps for rows (or blocks of rows) of `width` columns."""
    block = min(power_of_2(width, least=16), WIDEST)
    return {"BLOCK": block, "num_warps": 1 if block <= 256 else 4 if block <= 2048 else 8}


@triton.jit
def quantize_rows_kernel(
    p_x,
    p_scale,
    p_codes,
    p_scales,
    k,
    x_stride,
    width,
    largest,
    ENCODE: tl.constexpr,
    NATIVE: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks of `width` columns)."""
    wait_for_earlier(PDL)
    i_m = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    begin = i_block * width
    end = tl.minimum(begin + width, k)
    p_row = p_x + i_m * x_stride
    if STATIC:
        scale = tl.load(p_scale)
    else:
        b_most = tl.zeros([BLOCK], tl.float32)
        for i_k in tl.range(begin, end, BLOCK):
            o_k = i_k + tl.arange(0, BLOCK)
            b_most = tl.maximum(b_most, tl.abs(tl.load(p_row + o_k, mask=o_k < end, other=0.0).to(tl.float32)))
        # rounded division: plain `/` is approximate on a GPU, and a code on the edge would differ from the CPU's
        scale = tl.div_rn(tl.max(b_most, axis=0), largest)
        scale = tl.where(scale > 0, scale, 1.0)
    for i_k in tl.range(begin, end, BLOCK):
        o_k = i_k + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_k, mask=o_k < end, other=0.0).to(tl.float32)
        tl.store(p_codes + i_m * k + o_k, ENCODE(tl.div_rn(b_x, scale), NATIVE), mask=o_k < end)
    tl.store(p_scales + i_m * tl.num_programs(1) + i_block, scale)


def launch_quantize_rows(
    x: torch.Tensor, encode: Any, largest: float, block: int | None, scale: torch.Tensor | None, native: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qengine_kernels.quantize_rows.quantize_rows`."""
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    width = k if block is None or scale is not None else block
    blocks = ceil_div(k, width)
    codes = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((m, blocks), dtype=torch.float32, device=x.device)
    if m == 0:
        return codes, scales
    quantize_rows_kernel[(m, blocks)](
        x,
        scales if scale is None else scale,
        codes,
        scales,
        k,
        x.stride(0),
        width,
        largest,
        ENCODE=encode,
        NATIVE=native,
        STATIC=scale is not None,
        **quantize_rows_config(width),
        **overlap(x.device),
    )
    return codes, scales
