"""Rotary embedding and cache write in one launch: q is turned in place, k on its way into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.kv_side import CacheSide
from qengine_kernels.kv_write.kernel import store_tile, write_kv_config
from qengine_kernels.launch import ceil_div
from qengine_kernels.overlap import overlap, wait_for_earlier
from qengine_kernels.rotary.kernel import rotary_config, rotate_heads


@triton.jit
def _turned(p_row, o_dim, mask, p_cos, p_sin, HALF: tl.constexpr):
    """Rows of a vector turned by its token's angles, float32: element d < HALF belongs with d + HALF, and what follows
    2 * HALF passes through."""
    b_x = tl.load(p_row + o_dim, mask=mask, other=0.0)
    turning = o_dim < 2 * HALF
    first = o_dim < HALF
    b_other = tl.load(p_row + tl.where(first, o_dim + HALF, o_dim - HALF), mask=mask & turning, other=0.0)
    b_cos = tl.load(p_cos + o_dim % HALF, mask=turning, other=1.0)
    b_sin = tl.load(p_sin + o_dim % HALF, mask=turning, other=0.0)
    b_y = b_x.to(tl.float32) * b_cos + tl.where(first, -1.0, 1.0) * b_other.to(tl.float32) * b_sin
    # what is cached is what a rotated tensor of x's dtype would have held
    return b_y.to(b_x.dtype).to(tl.float32)


@triton.jit
def rotate_write_kernel(
    p_q, p_k, p_v, p_cos, p_sin, p_k_cache, p_v_cache, p_slots, p_k_inverse, p_v_inverse, q_heads, heads, q_tiles,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, cos_stride, sin_stride,
    k_block_stride, k_token_stride, k_row_stride, v_block_stride, v_token_stride, v_row_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    K_WRITE: tl.constexpr, K_ROWS: tl.constexpr, V_WRITE: tl.constexpr, V_ROWS: tl.constexpr, NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (token, tile of heads): the first `q_tiles` tiles are q's, the others K's and V's."""
    wait_for_earlier(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    p_cos += i_token * cos_stride
    p_sin += i_token * sin_stride
    if i_tile < q_tiles:
        o_half = tl.arange(0, BLOCK)
        b_cos = tl.load(p_cos + o_half, mask=o_half < HALF, other=0.0)
        b_sin = tl.load(p_sin + o_half, mask=o_half < HALF, other=0.0)
        rotate_heads(p_q + i_token * q_stride, q_heads, q_head_stride, i_tile, b_cos, b_sin, HALF, Q_HEADS, BLOCK)
    else:
        i_slot = tl.load(p_slots + i_token)
        if i_slot >= 0:
            o_head = (i_tile - q_tiles) * HEADS + tl.arange(0, HEADS)[:, None]
            o_dim = tl.arange(0, BLOCK_D)[None, :]
            head_mask = o_head < heads
            mask = head_mask & (o_dim < HEAD_DIM)
            i_block, i_offset = i_slot // BLOCK_SIZE, i_slot % BLOCK_SIZE
            b_k = _turned(p_k + i_token * k_stride + o_head * k_head_stride, o_dim, mask, p_cos, p_sin, HALF)
            b_k *= tl.load(p_k_inverse + o_head, mask=head_mask, other=1.0)
            p_rows = p_k_cache + i_block * k_block_stride + i_offset * k_token_stride + o_head * k_row_stride
            store_tile(b_k, p_rows, o_dim, head_mask, K_WRITE, K_ROWS, HEAD_DIM, NATIVE)
            p_row = p_v + i_token * v_stride + o_head * v_head_stride + o_dim
            b_v = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
            b_v *= tl.load(p_v_inverse + o_head, mask=head_mask, other=1.0)
            p_rows = p_v_cache + i_block * v_block_stride + i_offset * v_token_stride + o_head * v_row_stride
            store_tile(b_v, p_rows, o_dim, head_mask, V_WRITE, V_ROWS, HEAD_DIM, NATIVE)


def rotate_write_config(half: int, heads: int, head_dim: int) -> dict[str, int]:
    rotary = rotary_config(half)
    return write_kv_config(heads, head_dim) | {"BLOCK": rotary["BLOCK"], "Q_HEADS": rotary["HEADS"]}


def launch_rotate_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_side: CacheSide,
    v_side: CacheSide,
    slot_mapping: torch.Tensor,
    block_size: int,
    native: bool,
) -> None:
    """See `qengine_kernels.kv_write.rotate_write_kv`."""
    tokens, heads, head_dim = k.shape
    for side in (k_side, v_side):
        side.check(head_dim)
    if any(t.stride(-1) != 1 for t in (q, k, v, cos, sin)):
        raise ValueError("rotate_write_kv needs its tensors contiguous in their last dimension")
    if tokens == 0:
        return
    half = cos.shape[-1]
    config = rotate_write_config(half, heads, head_dim)
    q_tiles = ceil_div(q.shape[1], config["Q_HEADS"])
    rotate_write_kernel[(tokens, q_tiles + ceil_div(heads, config["HEADS"]))](
        q,
        k,
        v,
        cos,
        sin,
        k_side.cache,
        v_side.cache,
        slot_mapping,
        k_side.inverse,
        v_side.inverse,
        q.shape[1],
        heads,
        q_tiles,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        sin.stride(0),
        *k_side.strides,
        *v_side.strides,
        HALF=half,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        K_WRITE=k_side.write,
        K_ROWS=k_side.rows,
        V_WRITE=v_side.write,
        V_ROWS=v_side.rows,
        NATIVE=native,
        **config,
        **overlap(q.device),
    )
