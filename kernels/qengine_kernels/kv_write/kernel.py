"""The cache-write template: one program stores some heads of one token, K and V together."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qengine_kernels.launch import ceil_div, power_of_2


@triton.jit
def write_kv_kernel(
    p_k,
    p_v,
    p_cache,
    p_slots,
    p_k_inverse,
    p_v_inverse,
    heads,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_elements,
    k_offset,
    v_offset,
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ENCODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(p_slots + i_token)
    if i_slot >= 0:
        o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        o_dim = tl.arange(0, BLOCK_D)
        head_mask = o_head < heads
        mask = head_mask[:, None] & (o_dim < HEAD_DIM)[None, :]
        o_row = (i_slot // BLOCK_SIZE) * block_elements + (i_slot % BLOCK_SIZE) * token_stride
        o_out = o_row + o_head[:, None] * head_stride + o_dim[None, :]

        p_row = p_k + i_token * k_stride + o_head[:, None] * k_head_stride + o_dim[None, :]
        b_k = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
        b_k *= tl.load(p_k_inverse + o_head, mask=head_mask, other=1.0)[:, None]
        tl.store(p_cache + k_offset + o_out, ENCODE(b_k, NATIVE).to(p_cache.dtype.element_ty), mask=mask)

        p_row = p_v + i_token * v_stride + o_head[:, None] * v_head_stride + o_dim[None, :]
        b_v = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
        b_v *= tl.load(p_v_inverse + o_head, mask=head_mask, other=1.0)[:, None]
        tl.store(p_cache + v_offset + o_out, ENCODE(b_v, NATIVE).to(p_cache.dtype.element_ty), mask=mask)


def write_kv_config(heads: int, head_dim: int) -> dict[str, int]:
    block_d = power_of_2(head_dim)
    return {"BLOCK_D": block_d, "HEADS": min(power_of_2(heads), max(1, 2048 // block_d)), "num_warps": 4}


def launch_write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    storage: torch.Tensor,
    layout: Any,
    slot_mapping: torch.Tensor,
    k_inverse_scale: torch.Tensor,
    v_inverse_scale: torch.Tensor,
    encode: Any,
    native: bool,
) -> None:
    """See `qengine_kernels.kv_write.write_kv`."""
    tokens, heads, head_dim = k.shape
    if layout.row != head_dim:
        raise ValueError(f"write_kv stores one element a value; have row {layout.row}, head_dim {head_dim}")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("write_kv needs k and v contiguous in their last dimension")
    if tokens == 0:
        return
    config, cache = write_kv_config(heads, head_dim), storage.view(layout.dtype)
    write_kv_kernel[(tokens, ceil_div(heads, config["HEADS"]))](
        k,
        v,
        cache,
        slot_mapping,
        k_inverse_scale,
        v_inverse_scale,
        heads,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cache.stride(0),
        layout.k_offset,
        layout.v_offset,
        layout.token_stride,
        layout.head_stride,
        BLOCK_SIZE=layout.block_size,
        HEAD_DIM=head_dim,
        ENCODE=encode,
        NATIVE=native,
        **config,
    )
