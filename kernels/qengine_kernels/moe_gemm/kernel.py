"""The grouped GEMM of a mixture of experts, with the format's device function injected.

Rows of x are sorted by expert; each program takes one tile of rows that share an expert and one tile of that expert's
outputs. Weights are stored elements (int32 words of SLOTS codes, bytes, or floats; SLOTS 1 for the last two) and become
numbers in registers:

    SLOTS > 1   UNPACK(words, SLOT)     the codes in one slot, as for `wna16_gemm`
    SLOTS == 1  UNPACK(block, NATIVE)   the values of one element each, as for `w8a16_gemm` and KV dtypes

Weights are (value - zero) * scale; products accumulate in float32. Where one scale covers all rows of a tile's K, sums
are scaled; else the weights are, in float32, before they are rounded to x's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _find_tile(p_offsets, i_tile, experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert that row tile number i_tile belongs to, its first row and the end of the expert's rows. An expert
    beyond the last one means that there are fewer tiles."""
    o_expert = tl.arange(0, EXPERTS)
    b_begin = tl.load(p_offsets + o_expert, mask=o_expert < experts, other=0)
    b_end = tl.load(p_offsets + o_expert + 1, mask=o_expert < experts, other=0)
    b_tiles = (b_end - b_begin + BLOCK_M - 1) // BLOCK_M
    b_last = tl.cumsum(b_tiles, 0)
    i_expert = tl.sum((b_last <= i_tile).to(tl.int32), 0)
    found = o_expert == i_expert
    i_row = tl.sum(tl.where(found, b_begin + (i_tile - b_last + b_tiles) * BLOCK_M, 0), 0)
    i_end = tl.sum(tl.where(found, b_end, 0), 0)
    return i_expert, i_row, i_end


@triton.jit
def _first_row(o_word, SLICE: tl.constexpr, SLOTS: tl.constexpr):
    """The weight row in slot 0 of each word row (see `wna16_gemm.layout`); itself where SLOTS is 1."""
    return (o_word // SLICE) * (SLOTS * SLICE) + o_word % SLICE


@triton.jit
def _load_scales(
    p_scales, p_zeros, o_k, o_scale, n_mask, s_k, s_n, group_size, groups, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr
):
    """Scales and zeros, float32 [len(o_k), len(o_scale)], of the groups of weight rows o_k."""
    i_group = tl.minimum(o_k // group_size, groups - 1)
    o = i_group[:, None] * s_k + o_scale[None, :] * s_n
    b_scale = tl.load(p_scales + o, mask=n_mask[None, :], other=0.0).to(tl.float32)
    if HAS_ZEROS:
        b_zero = tl.load(p_zeros + o, mask=n_mask[None, :], other=0).to(tl.float32)
    else:
        b_zero = b_scale * 0.0 + ZERO
    return b_scale, b_zero


@triton.jit(do_not_specialize=["top_k"])
def grouped_gemm_kernel(
    p_x,
    p_weight,
    p_scales,
    p_zeros,
    p_scale_rows,
    p_columns,
    p_offsets,
    p_order,
    p_pair_weights,
    p_out,
    experts,
    top_k,
    n,
    k,
    word_rows,
    x_stride,
    w_expert,
    w_k,
    w_n,
    s_expert,
    s_k,
    s_n,
    group_size,
    groups,
    UNPACK: tl.constexpr,
    NATIVE: tl.constexpr,
    SLOTS: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_SCALE_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    COMBINE: tl.constexpr,
    DOT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (tile of N, tile of rows). Strides w_* and s_* count elements; `word_rows` stored rows make K.

    p_columns int32 [experts, K]: the column of x that each weight row multiplies (HAS_COLUMNS).
    p_scale_rows int32 [N]: the row of scales that each output takes (HAS_SCALE_ROWS).
    GROUPING as `wna16_gemm.config.grouping` says: new scales 0 by block, 1 by stored row, 2 by slot, 3 by row and slot.
    COMBINE: rows of x are in sorted order, results go to their pair's row, times its weight; else rows of x are tokens
    and results are in sorted order.
    """
    SUMS_SCALED: tl.constexpr = HAS_SCALES and SLOTS == 1 and GROUPING == 0 and not HAS_ZEROS and ZERO == 0
    i_expert, i_row, i_end = _find_tile(p_offsets, tl.program_id(1), experts, BLOCK_M, EXPERTS)
    if i_expert >= experts:
        return
    o_row = i_row + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = o_row < i_end
    n_mask = o_n < n
    o_pair = tl.load(p_order + o_row, mask=m_mask, other=0).to(tl.int64)
    if COMBINE:
        o_x, o_y = o_row.to(tl.int64), o_pair
    else:
        o_x, o_y = o_pair // top_k, o_row.to(tl.int64)
    p_rows = p_x + o_x[:, None] * x_stride
    i_expert = i_expert.to(tl.int64)
    p_weight += i_expert * w_expert + o_n.to(tl.int64)[None, :] * w_n
    p_scales += i_expert * s_expert
    p_zeros += i_expert * s_expert
    o_scale = o_n
    if HAS_SCALE_ROWS:
        o_scale = tl.load(p_scale_rows + o_n, mask=n_mask, other=0)
    if DOT:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        b_acc = tl.zeros([BLOCK_M, BLOCK_W, BLOCK_N], tl.float32)
    if SLOTS == 1:
        word_rows = k  # the same number, of which the compiler knows more
    for i_word in tl.range(0, word_rows, BLOCK_W):
        o_word = i_word + tl.arange(0, BLOCK_W)
        w_mask = (o_word < word_rows)[:, None] & n_mask[None, :]
        b_words = tl.load(p_weight + o_word.to(tl.int64)[:, None] * w_k, mask=w_mask, other=0)
        o_first = _first_row(o_word, SLICE, SLOTS)
        for SLOT in tl.static_range(SLOTS):
            o_k = o_first + SLOT * SLICE
            k_mask = o_k < k
            if SLOTS > 1:
                k_mask &= o_word < word_rows
            o_x_column = o_k
            if HAS_COLUMNS:
                o_x_column = tl.load(p_columns + i_expert * k + o_k, mask=k_mask, other=0)
            x_mask = m_mask[:, None] & k_mask[None, :]
            b_x = tl.load(p_rows + o_x_column[None, :], mask=x_mask, other=0.0)
            if SLOTS == 1:
                b_w = UNPACK(b_words, NATIVE)
            else:
                b_w = UNPACK(b_words, SLOT)
            if HAS_SCALES and (SLOT == 0 or GROUPING >= 2):
                o_group = o_k
                if GROUPING == 0 or GROUPING == 2:
                    o_group = _first_row(i_word + tl.arange(0, 1), SLICE, SLOTS) + SLOT * SLICE
                b_scale, b_zero = _load_scales(
                    p_scales, p_zeros, o_group, o_scale, n_mask, s_k, s_n, group_size, groups, HAS_ZEROS, ZERO
                )
            if HAS_SCALES and not SUMS_SCALED:
                b_w = (b_w.to(tl.float32) - b_zero) * b_scale
            if DOT:
                if SUMS_SCALED:
                    b_acc += tl.dot(b_x, b_w.to(b_x.dtype), input_precision="ieee") * b_scale
                else:
                    b_acc = tl.dot(b_x, b_w.to(b_x.dtype), b_acc, input_precision="ieee")
            else:
                b_w = b_w.to(tl.float32)
                if SUMS_SCALED:
                    b_w *= b_scale
                b_acc += b_x.to(tl.float32)[:, :, None] * b_w[None, :, :]
    if DOT:
        b_y = b_acc
    else:
        b_y = tl.sum(b_acc, axis=1)
    if COMBINE:
        b_y *= tl.load(p_pair_weights + o_pair, mask=m_mask, other=0.0)[:, None]
    p_y = p_out + o_y[:, None] * n + o_n[None, :]
    tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])
