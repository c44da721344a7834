"""The 8-bit by 8-bit kernel, with the format's product injected.

DOT(a, w, NATIVE) multiplies a tile of codes; its sums are added up in float32 here, because matrix units for 8-bit
floats keep fewer bits in theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m", "share"])
def pair_gemm_kernel(
    p_a,
    p_a_scales,
    p_codes,
    p_scales,
    p_rows,
    p_bias,
    p_out,
    m,
    n,
    k,
    scale_block,
    columns,
    share,
    DOT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCKED: tl.constexpr,
    A_BLOCKED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tile of M, tile of N, split of K): neighbouring programs share a tile of the weight. With SPLIT, p_out is
    float32 [splits, M, N] and gets no bias. A_BLOCKED activations have `columns` scales a row, others one."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_split = tl.program_id(2)
    m_mask = o_m < m
    n_mask = o_n < n
    if HAS_ROWS:
        o_row = tl.load(p_rows + o_n, mask=n_mask, other=0)
    else:
        o_row = o_n
    p_w_scale = p_scales + o_row * columns
    p_a_scale = p_a_scales + o_m * (columns if A_BLOCKED else 1)
    p_a_rows = p_a + o_m.to(tl.int64)[:, None] * k
    p_w_rows = p_codes + o_n.to(tl.int64)[None, :] * k
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = i_split * share
    for i_tile in tl.range(begin, tl.minimum(begin + share, tl.cdiv(k, BLOCK_K))):
        i_k = i_tile * BLOCK_K
        o_k = i_k + tl.arange(0, BLOCK_K)
        k_mask = o_k < k
        b_a = tl.load(p_a_rows + o_k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0)
        b_w = tl.load(p_w_rows + o_k[:, None], mask=k_mask[:, None] & n_mask[None, :], other=0)
        b_part = DOT(b_a, b_w, NATIVE)
        if BLOCKED:
            b_part *= tl.load(p_w_scale + i_k // scale_block, mask=n_mask, other=0.0)[None, :]
            if A_BLOCKED:
                b_part *= tl.load(p_a_scale + i_k // scale_block, mask=m_mask, other=0.0)[:, None]
        b_acc += b_part
    if not BLOCKED:
        b_acc *= tl.load(p_w_scale, mask=n_mask, other=0.0)[None, :]
    if not A_BLOCKED:
        b_acc *= tl.load(p_a_scale, mask=m_mask, other=0.0)[:, None]
    if HAS_BIAS and not SPLIT:
        b_acc += tl.load(p_bias + o_n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    o_out = (i_split.to(tl.int64) * m + o_m)[:, None] * n + o_n[None, :]
    tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])
