"""Weight-only kernels over the packed layout of `layout.py`, with the format's unpack function injected.

UNPACK(words, SLOT) takes a block of int32 words and a constexpr slot number and returns the codes as a float32 or
integer block; a word has SLOTS of them. Weights become (code - zero) * scale in float32, and products accumulate in
float32.

`gemv_kernel` multiplies and adds (a few rows of x, bound by reading the weight), `gemm_kernel` uses `tl.dot`,
`dequantize_kernel` writes the dense weight for a library GEMM. The first two can share K among several programs (SPLIT)
whose float32 results `sum_splits_kernel` adds in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _first_row(o_word, SLICE: tl.constexpr, SLOTS: tl.constexpr):
    """The weight row in slot 0 of each word row."""
    return (o_word // SLICE) * (SLOTS * SLICE) + o_word % SLICE


@triton.jit
def _load_group(p_scales, p_zeros, o_k, o_n, n, group_size, groups, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr):
    """Scales and zeros, float32 [len(o_k), len(o_n)], of the groups of rows o_k. Rows past K take the last group's."""
    i_group = tl.minimum(o_k // group_size, groups - 1)
    o = i_group[:, None] * n + o_n[None, :]
    mask = (o_n < n)[None, :]
    b_scale = tl.load(p_scales + o, mask=mask, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        b_zero = tl.load(p_zeros + o, mask=mask, other=0).to(tl.float32)
    else:
        b_zero = b_scale * 0.0 + ZERO
    return b_scale, b_zero


@triton.jit
def _load_block(
    p_words,
    p_scales,
    p_zeros,
    i_word,
    o_word,
    end,
    o_n,
    n,
    group_size,
    groups,
    SLICE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """A block of words and the scales and zeros that go with it: one row of them for the whole block (GROUPING 0) or
    one for each word row (GROUPING 1). With GROUPING 2 and 3 the same holds for slot 0 only; `_load_slot_group` has the
    others."""
    p_block = p_words + o_word.to(tl.int64)[:, None] * n + o_n[None, :]
    b_words = tl.load(p_block, mask=(o_word < end)[:, None] & (o_n < n)[None, :], other=0)
    o_group = _first_row(o_word, SLICE, SLOTS)
    if GROUPING == 0 or GROUPING == 2:
        o_group = _first_row(i_word + tl.arange(0, 1), SLICE, SLOTS)
    b_scale, b_zero = _load_group(p_scales, p_zeros, o_group, o_n, n, group_size, groups, HAS_ZEROS, ZERO)
    return b_words, b_scale, b_zero


@triton.jit
def _load_slot_group(
    p_scales,
    p_zeros,
    i_word,
    o_k,
    o_n,
    n,
    group_size,
    groups,
    SLICE: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Scales and zeros of one slot: a row for all of the block's rows (GROUPING 2) or one for each (GROUPING 3)."""
    o_group = o_k
    if GROUPING == 2:
        o_group = _first_row(i_word + tl.arange(0, 1), SLICE, SLOTS) + SLOT * SLICE
    return _load_group(p_scales, p_zeros, o_group, o_n, n, group_size, groups, HAS_ZEROS, ZERO)


@triton.jit(do_not_specialize=["m", "share"])
def gemv_kernel(
    p_x,
    p_words,
    p_scales,
    p_zeros,
    p_bias,
    p_out,
    m,
    n,
    k,
    x_stride,
    group_size,
    groups,
    word_rows,
    share,
    UNPACK: tl.constexpr,
    SLICE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (tile of N, split of K, tile of M); a split takes `share` word rows. With SPLIT, p_out is float32
    [splits, M, N] and gets no bias."""
    i_split = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_mask = o_n < n
    p_rows = p_x + o_m.to(tl.int64)[:, None] * x_stride
    b_acc = tl.zeros([BLOCK_M, BLOCK_W, BLOCK_N], tl.float32)
    begin = i_split * share
    end = tl.minimum(begin + share, word_rows)
    for i_word in tl.range(begin, end, BLOCK_W):
        o_word = i_word + tl.arange(0, BLOCK_W)
        o_first = _first_row(o_word, SLICE, SLOTS)
        b_words, b_scale, b_zero = _load_block(
            p_words, p_scales, p_zeros, i_word, o_word, end, o_n, n, group_size, groups,
            SLICE, SLOTS, GROUPING, HAS_ZEROS, ZERO,
        )
        for SLOT in tl.static_range(SLOTS):
            o_k = o_first + SLOT * SLICE
            if GROUPING >= 2:
                b_scale, b_zero = _load_slot_group(
                    p_scales, p_zeros, i_word, o_k, o_n, n, group_size, groups,
                    SLICE, SLOTS, SLOT, GROUPING, HAS_ZEROS, ZERO,
                )
            x_mask = (o_m < m)[:, None] & ((o_k < k) & (o_word < end))[None, :]
            b_x = tl.load(p_rows + o_k[None, :], mask=x_mask, other=0.0).to(tl.float32)
            b_w = (UNPACK(b_words, SLOT).to(tl.float32) - b_zero) * b_scale
            b_acc += b_x[:, :, None] * b_w[None, :, :]
    b_y = tl.sum(b_acc, axis=1)
    o_out = (i_split.to(tl.int64) * m + o_m)[:, None] * n + o_n[None, :]
    if HAS_BIAS and not SPLIT:
        b_y += tl.load(p_bias + o_n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(p_out + o_out, b_y.to(p_out.dtype.element_ty), mask=(o_m < m)[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["m", "share"])
def gemm_kernel(
    p_x,
    p_words,
    p_scales,
    p_zeros,
    p_bias,
    p_out,
    m,
    n,
    k,
    x_stride,
    group_size,
    groups,
    word_rows,
    share,
    UNPACK: tl.constexpr,
    SLICE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """As `gemv_kernel`, with one `tl.dot` for each slot: [BLOCK_M, BLOCK_W] x [BLOCK_W, BLOCK_N]."""
    i_split = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_mask = o_n < n
    p_rows = p_x + o_m.to(tl.int64)[:, None] * x_stride
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = i_split * share
    end = tl.minimum(begin + share, word_rows)
    for i_word in tl.range(begin, end, BLOCK_W):
        o_word = i_word + tl.arange(0, BLOCK_W)
        o_first = _first_row(o_word, SLICE, SLOTS)
        b_words, b_scale, b_zero = _load_block(
            p_words, p_scales, p_zeros, i_word, o_word, end, o_n, n, group_size, groups,
            SLICE, SLOTS, GROUPING, HAS_ZEROS, ZERO,
        )
        for SLOT in tl.static_range(SLOTS):
            o_k = o_first + SLOT * SLICE
            if GROUPING >= 2:
                b_scale, b_zero = _load_slot_group(
                    p_scales, p_zeros, i_word, o_k, o_n, n, group_size, groups,
                    SLICE, SLOTS, SLOT, GROUPING, HAS_ZEROS, ZERO,
                )
            x_mask = (o_m < m)[:, None] & ((o_k < k) & (o_word < end))[None, :]
            b_x = tl.load(p_rows + o_k[None, :], mask=x_mask, other=0.0)
            b_w = ((UNPACK(b_words, SLOT).to(tl.float32) - b_zero) * b_scale).to(b_x.dtype)
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    o_out = (i_split.to(tl.int64) * m + o_m)[:, None] * n + o_n[None, :]
    if HAS_BIAS and not SPLIT:
        b_acc += tl.load(p_bias + o_n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=(o_m < m)[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["elements", "splits"])
def sum_splits_kernel(
    p_parts, p_bias, p_out, elements, n, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """p_parts float32 [splits, M * N] -> p_out [M * N], in the order of the splits."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < elements
    b_y = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, splits):
        b_y += tl.load(p_parts + o, mask=mask, other=0.0)
        p_parts += elements
    if HAS_BIAS:
        b_y += tl.load(p_bias + o % n, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + o, b_y.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_first"])
def dequantize_kernel(
    p_words,
    p_scales,
    p_zeros,
    p_out,
    n,
    k,
    n_first,
    n_count,
    group_size,
    groups,
    word_rows,
    UNPACK: tl.constexpr,
    SLICE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Columns [n_first, n_first + n_count) of the weight, dense: p_out [K, n_count].
    Grid (tile of N, tile of word rows)."""
    o_local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_word = tl.program_id(1) * BLOCK_W
    o_word = i_word + tl.arange(0, BLOCK_W)
    o_n = n_first + o_local
    n_mask = o_local < n_count
    o_first = _first_row(o_word, SLICE, SLOTS)
    b_words, b_scale, b_zero = _load_block(
        p_words, p_scales, p_zeros, i_word, o_word, word_rows, o_n, n, group_size, groups,
        SLICE, SLOTS, GROUPING, HAS_ZEROS, ZERO,
    )
    for SLOT in tl.static_range(SLOTS):
        o_k = o_first + SLOT * SLICE
        if GROUPING >= 2:
            b_scale, b_zero = _load_slot_group(
                p_scales, p_zeros, i_word, o_k, o_n, n, group_size, groups,
                SLICE, SLOTS, SLOT, GROUPING, HAS_ZEROS, ZERO,
            )
        b_w = (UNPACK(b_words, SLOT).to(tl.float32) - b_zero) * b_scale
        p_rows = p_out + o_k.to(tl.int64)[:, None] * n_count + o_local[None, :]
        store_mask = ((o_k < k) & (o_word < word_rows))[:, None] & n_mask[None, :]
        tl.store(p_rows, b_w.to(p_out.dtype.element_ty), mask=store_mask)
