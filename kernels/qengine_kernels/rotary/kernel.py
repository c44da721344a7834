"""Rotary embedding as one Triton kernel for q and k together, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2


@triton.jit
def rotate_heads(
    p_x,
    heads,
    head_stride,
    i_tile,
    b_cos,
    b_sin,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_head = i_tile * HEADS + tl.arange(0, HEADS)
    o_dim = tl.arange(0, BLOCK)
    mask = (o_head < heads)[:, None] & (o_dim < HALF)[None, :]
    p_low = p_x + o_head[:, None] * head_stride + o_dim[None, :]
    b_low = tl.load(p_low, mask=mask, other=0.0).to(tl.float32)
    b_high = tl.load(p_low + HALF, mask=mask, other=0.0).to(tl.float32)
    b_new_low = b_low * b_cos[None, :] - b_high * b_sin[None, :]
    b_new_high = b_high * b_cos[None, :] + b_low * b_sin[None, :]
    tl.store(p_low, b_new_low.to(p_x.dtype.element_ty), mask=mask)
    tl.store(p_low + HALF, b_new_high.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    p_q,
    p_k,
    p_cos,
    p_sin,
    q_heads,
    k_heads,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    cos_stride,
    sin_stride,
    q_tiles,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (token, tile of heads): the first `q_tiles` tiles are q's, the others k's."""
    i_token = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    o_dim = tl.arange(0, BLOCK)
    b_cos = tl.load(p_cos + i_token * cos_stride + o_dim, mask=o_dim < HALF, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_token * sin_stride + o_dim, mask=o_dim < HALF, other=0.0).to(tl.float32)
    if i_tile < q_tiles:
        rotate_heads(p_q + i_token * q_stride, q_heads, q_head_stride, i_tile, b_cos, b_sin, HALF, HEADS, BLOCK)
    else:
        p_row = p_k + i_token * k_stride
        rotate_heads(p_row, k_heads, k_head_stride, i_tile - q_tiles, b_cos, b_sin, HALF, HEADS, BLOCK)


def rotary_config(half: int) -> dict[str, int]:
    block = power_of_2(half)
    return {"BLOCK": block, "HEADS": max(1, min(16, 512 // block)), "num_warps": 4}


def launch_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `qengine_kernels.rotary.rotary_`."""
    if any(t.stride(-1) != 1 for t in (q, k, cos, sin)):
        raise ValueError("rotary_ needs q, k, cos and sin contiguous in their last dimension")
    if q.shape[0] == 0:
        return
    half = cos.shape[-1]
    config = rotary_config(half)
    q_tiles = ceil_div(q.shape[1], config["HEADS"])
    grid = (q.shape[0], q_tiles + ceil_div(k.shape[1], config["HEADS"]))
    rotary_kernel[grid](
        q,
        k,
        cos,
        sin,
        q.shape[1],
        k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos.stride(0),
        sin.stride(0),
        q_tiles,
        HALF=half,
        **config,
    )
