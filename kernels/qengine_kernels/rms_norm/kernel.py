"""RMS norm as one Triton kernel: a program takes whole rows, so x is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2
from qengine_kernels.overlap import overlap, wait_for_earlier


@triton.jit
def rms_norm_kernel(
    p_x,
    p_weight,
    p_residual,
    p_out,
    rows,
    heads,
    x_stride,
    x_head_stride,
    eps,
    weight_offset,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows are (outer, head) pairs of x; residual and out are contiguous [rows, WIDTH]."""
    wait_for_earlier(PDL)
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_col = tl.arange(0, BLOCK)
    mask = (i_row < rows)[:, None] & (o_col < WIDTH)[None, :]
    o_x = (i_row // heads) * x_stride + (i_row % heads) * x_head_stride
    o_out = i_row[:, None] * WIDTH + o_col[None, :]
    b_x = tl.load(p_x + o_x[:, None] + o_col[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_x += tl.load(p_residual + o_out, mask=mask, other=0.0).to(tl.float32)
        b_sum = b_x.to(p_residual.dtype.element_ty)
        tl.store(p_residual + o_out, b_sum, mask=mask)
        # The normalised value is that of the stored sum, so that a 16-bit residual means the same as in torch.
        b_x = b_sum.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / WIDTH + eps)
    b_weight = tl.load(p_weight + o_col, mask=o_col < WIDTH, other=0.0).to(tl.float32) + weight_offset
    b_y = b_x * b_scale[:, None] * b_weight[None, :]
    tl.store(p_out + o_out, b_y.to(p_out.dtype.element_ty), mask=mask)


def rms_norm_config(width: int) -> dict[str, int]:
    """Narrow rows (a head's q/k norm) share a program; wide ones get more warps."""
    block = power_of_2(width)
    return {
        "BLOCK": block,
        "ROWS": max(1, min(16, 1024 // block)),
        "num_warps": min(16, max(4, block // 512)),
    }


def launch_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `qengine_kernels.rms_norm.rms_norm`. A residual must be contiguous; x may be a strided [T, heads, D] view."""
    width = x.shape[-1]
    if residual is not None and not residual.is_contiguous():
        raise ValueError("rms_norm updates its residual in place and needs it contiguous")
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.contiguous().view(-1, width)
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    rows = x.numel() // width
    if rows == 0:
        return out
    config = rms_norm_config(width)
    rms_norm_kernel[(ceil_div(rows, config["ROWS"]),)](
        x,
        weight,
        x if residual is None else residual,
        out,
        rows,
        heads,
        x.stride(0),
        head_stride,
        eps,
        weight_offset,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        **config,
        **overlap(x.device),
    )
    return out
