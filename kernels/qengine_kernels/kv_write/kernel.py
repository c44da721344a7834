"""The cache-write template: one program stores some heads of one token, K and V together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine_kernels.kv_side import CacheSide
from qengine_kernels.launch import ceil_div, power_of_2


@triton.jit
def store_tile(
    x, p_rows, o_dim, row_mask, WRITE: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr
):
    """x float32 [R, D] to the rows that start at p_rows [R, 1]; WRITE encodes elements, or with ROWS stores rows."""
    if ROWS:
        WRITE(x, p_rows, row_mask, HEAD_DIM, NATIVE)
    else:
        b_code = WRITE(x, NATIVE).to(p_rows.dtype.element_ty)
        tl.store(p_rows + o_dim, b_code, mask=row_mask & (o_dim < HEAD_DIM))


@triton.jit
def write_kv_kernel(
    p_k,
    p_v,
    p_k_cache,
    p_v_cache,
    p_slots,
    p_k_inverse,
    p_v_inverse,
    heads,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_block_stride,
    k_token_stride,
    k_row_stride,
    v_block_stride,
    v_token_stride,
    v_row_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    K_WRITE: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_WRITE: tl.constexpr,
    V_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(p_slots + i_token)
    if i_slot >= 0:
        o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        o_dim = tl.arange(0, BLOCK_D)[None, :]
        head_mask = o_head < heads
        mask = head_mask & (o_dim < HEAD_DIM)
        i_block, i_offset = i_slot // BLOCK_SIZE, i_slot % BLOCK_SIZE

        p_row = p_k + i_token * k_stride + o_head * k_head_stride + o_dim
        b_k = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
        b_k *= tl.load(p_k_inverse + o_head, mask=head_mask, other=1.0)
        p_rows = p_k_cache + i_block * k_block_stride + i_offset * k_token_stride + o_head * k_row_stride
        store_tile(b_k, p_rows, o_dim, head_mask, K_WRITE, K_ROWS, HEAD_DIM, NATIVE)

        p_row = p_v + i_token * v_stride + o_head * v_head_stride + o_dim
        b_v = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
        b_v *= tl.load(p_v_inverse + o_head, mask=head_mask, other=1.0)
        p_rows = p_v_cache + i_block * v_block_stride + i_offset * v_token_stride + o_head * v_row_stride
        store_tile(b_v, p_rows, o_dim, head_mask, V_WRITE, V_ROWS, HEAD_DIM, NATIVE)


def write_kv_config(heads: int, head_dim: int) -> dict[str, int]:
    block_d = power_of_2(head_dim)
    return {"BLOCK_D": block_d, "HEADS": min(power_of_2(heads), max(1, 2048 // block_d)), "num_warps": 4}


def launch_write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_side: CacheSide,
    v_side: CacheSide,
    slot_mapping: torch.Tensor,
    block_size: int,
    native: bool,
) -> None:
    """See `qengine_kernels.kv_write.write_kv`."""
    tokens, heads, head_dim = k.shape
    for side in (k_side, v_side):
        side.check(head_dim)
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("write_kv needs k and v contiguous in their last dimension")
    if tokens == 0:
        return
    config = write_kv_config(heads, head_dim)
    write_kv_kernel[(tokens, ceil_div(heads, config["HEADS"]))](
        k,
        v,
        k_side.cache,
        v_side.cache,
        slot_mapping,
        k_side.inverse,
        v_side.inverse,
        heads,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_side.strides,
        *v_side.strides,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        K_WRITE=k_side.write,
        K_ROWS=k_side.rows,
        V_WRITE=v_side.write,
        V_ROWS=v_side.rows,
        NATIVE=native,
        **config,
    )
