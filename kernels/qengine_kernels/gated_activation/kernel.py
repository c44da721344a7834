"""Gated activation as one Triton kernel over [T, 2 * I], and its variant that keeps rows within a range."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2
from qengine_kernels.overlap import overlap, wait_for_earlier


@triton.jit
def _tanh(x):
    # exp of a negative number only, so that nothing overflows.
    b_decay = tl.exp(-2.0 * tl.abs(x))
    b_size = (1.0 - b_decay) / (1.0 + b_decay)
    return tl.where(x < 0.0, -b_size, b_size)


@triton.jit
def _gated(b_gate, b_up, KIND: tl.constexpr):
    """act(gate) * up in float32."""
    if KIND == "silu":
        b_gate = b_gate * tl.sigmoid(b_gate)
    elif KIND == "gelu":
        b_gate = 0.5 * b_gate * (1.0 + tl.erf(b_gate * 0.7071067811865476))
    else:
        b_inner = 0.7978845608028654 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
        b_gate = 0.5 * b_gate * (1.0 + _tanh(b_inner))
    return b_gate * b_up


@triton.jit
def gated_activation_kernel(
    p_x, p_out, width, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_earlier(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_col < width
    p_row = p_x + i_row * x_stride
    b_gate = tl.load(p_row + o_col, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + width + o_col, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * width + o_col, _gated(b_gate, b_up, KIND).to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def scaled_activation_kernel(
    p_x, p_out, p_scale, width, x_stride, limit, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """A program takes one row, twice: for its largest magnitude, and to write it divided by a power of two."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_x + i_row * x_stride
    b_most = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        o_col = start + tl.arange(0, BLOCK)
        b_gate = tl.load(p_row + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        b_up = tl.load(p_row + width + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        b_most = tl.maximum(b_most, tl.abs(_gated(b_gate, b_up, KIND)))
    ratio = tl.max(b_most, axis=0) / limit
    # The smallest power of two that is at least `ratio`: its exponent, rounded up.
    exponent = ((ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) << 23
    scale = tl.where(ratio > 1.0, exponent.to(tl.float32, bitcast=True), 1.0)
    tl.store(p_scale + i_row, scale)
    for start in range(0, width, BLOCK):
        o_col = start + tl.arange(0, BLOCK)
        b_gate = tl.load(p_row + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        b_up = tl.load(p_row + width + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        b_y = _gated(b_gate, b_up, KIND) / scale
        tl.store(p_out + i_row * width + o_col, b_y.to(p_out.dtype.element_ty), mask=o_col < width)


def gated_activation_config(width: int) -> dict[str, int]:
    return {"BLOCK": min(1024, power_of_2(width)), "num_warps": 4}


def launch_gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """See `qengine_kernels.gated_activation.gated_activation`."""
    rows, width = x.shape[0], x.shape[1] // 2
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    config = gated_activation_config(width)
    grid = (rows, ceil_div(width, config["BLOCK"]))
    gated_activation_kernel[grid](x, out, width, x.stride(0), KIND=kind, **config, **overlap(x.device))
    return out


def launch_scaled_activation(x: torch.Tensor, kind: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qengine_kernels.gated_activation.scaled_activation`."""
    rows, width = x.shape[0], x.shape[1] // 2
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        config = gated_activation_config(width)
        scaled_activation_kernel[(rows,)](x, out, scale, width, x.stride(0), limit, KIND=kind, **config)
    return out, scale
