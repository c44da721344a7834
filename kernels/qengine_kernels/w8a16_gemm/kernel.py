"""Weight-only 8-bit kernels over the layout of `layout.py`, with the format's decode function injected.

DECODE(codes, NATIVE) takes a block of uint8 codes and returns their values as float16, exactly. Where scales change
along K (BLOCKED) a tile lies within one block of them, so a tile's product takes one scale a row; else rows are scaled
once, at the end. Either way the two GEMMs multiply float32 sums by scales, not rounded weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scale_rows(p_scales, p_rows, o_n, n_mask, columns, HAS_ROWS: tl.constexpr):
    """Pointers to the first scale of rows o_n."""
    if HAS_ROWS:
        o_row = tl.load(p_rows + o_n, mask=n_mask, other=0)
    else:
        o_row = o_n
    return p_scales + o_row * columns


@triton.jit(do_not_specialize=["m", "share"])
def byte_gemv_kernel(
    p_x,
    p_codes,
    p_scales,
    p_rows,
    p_bias,
    p_out,
    m,
    n,
    k,
    x_stride,
    scale_block,
    columns,
    share,
    DECODE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCKED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tile of N, split of K, tile of M). A split takes `share` tiles of K: counted in tiles, so that the compiler
    sees how loads are aligned. With SPLIT, p_out is float32 [splits, M, N] and gets no bias."""
    i_split = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_mask = o_n < n
    m_mask = o_m < m
    p_scale = _scale_rows(p_scales, p_rows, o_n, n_mask, columns, HAS_ROWS)
    p_x_rows = p_x + o_m.to(tl.int64)[:, None] * x_stride
    p_w_rows = p_codes + o_n.to(tl.int64)[:, None] * k
    b_acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    begin = i_split * share
    for i_tile in tl.range(begin, tl.minimum(begin + share, tl.cdiv(k, BLOCK_K))):
        i_k = i_tile * BLOCK_K
        o_k = i_k + tl.arange(0, BLOCK_K)
        k_mask = o_k < k
        b_codes = tl.load(p_w_rows + o_k[None, :], mask=n_mask[:, None] & k_mask[None, :], other=0)
        b_w = DECODE(b_codes, NATIVE).to(tl.float32)
        if BLOCKED:
            b_w *= tl.load(p_scale + i_k // scale_block, mask=n_mask, other=0.0)[:, None]
        b_x = tl.load(p_x_rows + o_k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0).to(tl.float32)
        b_acc += b_x[:, None, :] * b_w[None, :, :]
    b_y = tl.sum(b_acc, axis=2)
    if not BLOCKED:
        b_y *= tl.load(p_scale, mask=n_mask, other=0.0)[None, :]
    if HAS_BIAS and not SPLIT:
        b_y += tl.load(p_bias + o_n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    o_out = (i_split.to(tl.int64) * m + o_m)[:, None] * n + o_n[None, :]
    tl.store(p_out + o_out, b_y.to(p_out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["m", "share"])
def byte_gemm_kernel(
    p_x,
    p_codes,
    p_scales,
    p_rows,
    p_bias,
    p_out,
    m,
    n,
    k,
    x_stride,
    scale_block,
    columns,
    share,
    DECODE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCKED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `byte_gemv_kernel`, with `tl.dot`. Codes are loaded [BLOCK_K, BLOCK_N], their contiguous side first."""
    i_split = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_mask = o_n < n
    m_mask = o_m < m
    p_scale = _scale_rows(p_scales, p_rows, o_n, n_mask, columns, HAS_ROWS)
    p_x_rows = p_x + o_m.to(tl.int64)[:, None] * x_stride
    p_w_rows = p_codes + o_n.to(tl.int64)[None, :] * k
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = i_split * share
    for i_tile in tl.range(begin, tl.minimum(begin + share, tl.cdiv(k, BLOCK_K))):
        i_k = i_tile * BLOCK_K
        o_k = i_k + tl.arange(0, BLOCK_K)
        k_mask = o_k < k
        b_codes = tl.load(p_w_rows + o_k[:, None], mask=k_mask[:, None] & n_mask[None, :], other=0)
        b_x = tl.load(p_x_rows + o_k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        b_w = DECODE(b_codes, NATIVE).to(b_x.dtype)
        if BLOCKED:
            b_scale = tl.load(p_scale + i_k // scale_block, mask=n_mask, other=0.0)
            b_acc += tl.dot(b_x, b_w, input_precision="ieee") * b_scale[None, :]
        else:
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    if not BLOCKED:
        b_acc *= tl.load(p_scale, mask=n_mask, other=0.0)[None, :]
    if HAS_BIAS and not SPLIT:
        b_acc += tl.load(p_bias + o_n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    o_out = (i_split.to(tl.int64) * m + o_m)[:, None] * n + o_n[None, :]
    tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["n_first"])
def byte_dequantize_kernel(
    p_codes,
    p_scales,
    p_rows,
    p_out,
    k,
    n_first,
    n_count,
    scale_block,
    columns,
    DECODE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCKED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows [n_first, n_first + n_count) of the weight, dense: p_out [n_count, K]. Grid (tile of N, tile of K)."""
    o_local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_k = tl.program_id(1) * BLOCK_K
    o_k = i_k + tl.arange(0, BLOCK_K)
    n_mask = o_local < n_count
    mask = n_mask[:, None] & (o_k < k)[None, :]
    o_n = n_first + o_local
    p_scale = _scale_rows(p_scales, p_rows, o_n, n_mask, columns, HAS_ROWS)
    if BLOCKED:
        p_scale += i_k // scale_block
    b_codes = tl.load(p_codes + o_n.to(tl.int64)[:, None] * k + o_k[None, :], mask=mask, other=0)
    b_w = DECODE(b_codes, NATIVE).to(tl.float32) * tl.load(p_scale, mask=n_mask, other=0.0)[:, None]
    p_w = p_out + o_local.to(tl.int64)[:, None] * k + o_k[None, :]
    tl.store(p_w, b_w.to(p_out.dtype.element_ty), mask=mask)
