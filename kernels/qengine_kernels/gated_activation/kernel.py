"""Gated activation as one Triton kernel over [T, 2 * I]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2


@triton.jit
def _tanh(x):
    # exp of a negative number only, so that nothing overflows.
    b_decay = tl.exp(-2.0 * tl.abs(x))
    b_size = (1.0 - b_decay) / (1.0 + b_decay)
    return tl.where(x < 0.0, -b_size, b_size)


@triton.jit
def gated_activation_kernel(p_x, p_out, width, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_col < width
    p_row = p_x + i_row * x_stride
    b_gate = tl.load(p_row + o_col, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + width + o_col, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        b_gate = b_gate * tl.sigmoid(b_gate)
    elif KIND == "gelu":
        b_gate = 0.5 * b_gate * (1.0 + tl.erf(b_gate * 0.7071067811865476))
    else:
        b_inner = 0.7978845608028654 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
        b_gate = 0.5 * b_gate * (1.0 + _tanh(b_inner))
    tl.store(p_out + i_row * width + o_col, (b_gate * b_up).to(p_out.dtype.element_ty), mask=mask)


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
    gated_activation_kernel[grid](x, out, width, x.stride(0), KIND=kind, **config)
    return out
