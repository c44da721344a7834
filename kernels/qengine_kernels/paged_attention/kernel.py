"""The paged-attention template: one kernel for decode, prefill, chunked prefill and mixed steps.

A program takes a tile of rows, each row one (token, query head) pair of one KV head, so that all query heads that
share a KV head read its K and V once. It walks the sequence's cached tokens through the block table, with an online
softmax in float32. For decodes the walk is split over several programs, and `combine_kernel` joins their results; the
number of splits is a launch parameter and each program finds its share from the sequence's length on the device, so
that a captured launch stays valid as sequences grow.

Nothing outside a sequence's tokens is ever read (such loads are masked to 0), so garbage, even NaN, in unwritten slots
or in other sequences' blocks cannot reach an output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qengine_kernels.overlap import wait_for_earlier

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _soft_cap(x, cap):
    """cap * tanh(x / cap); exp of a negative number only."""
    b_decay = tl.exp2(tl.abs(x) / cap * (-2.0 * LOG2_E))
    b_size = cap * (1.0 - b_decay) / (1.0 + b_decay)
    return tl.where(x < 0.0, -b_size, b_size)


@triton.jit
def load_tile(
    p_rows, o_dim, row_mask, READ: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr
):
    """Decoded values o_dim of the rows that start at p_rows, 0 where masked; the three are broadcast against each
    other. READ decodes elements, or with ROWS loads rows."""
    if ROWS:
        return READ(p_rows, o_dim, row_mask, HEAD_DIM, NATIVE)
    else:
        return READ(tl.load(p_rows + o_dim, mask=row_mask & (o_dim < HEAD_DIM), other=0), NATIVE)


@triton.jit
def row_pointers(p_head, i_block, i_token, block_stride, token_stride, ALIGN: tl.constexpr):
    """The rows of some tokens of one head. All strides are multiples of ALIGN elements, which decides how many elements
    a thread may load at a time; the compiler itself sees multiples of 16 only."""
    return p_head + tl.multiple_of(i_block * block_stride + i_token * token_stride, ALIGN)


@triton.jit
def _load_values(
    p_rows, o_w, row_mask, READ: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
    PAIRS: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile as DTYPE; with PAIRS the values at even places and those at odd ones."""
    if PAIRS:
        if MASKED:
            b_pairs = tl.load(p_rows + o_w, mask=row_mask & (o_w < WIDTH), other=0)
        else:
            b_pairs = tl.load(p_rows + o_w)
        b_even, b_odd = READ(b_pairs, NATIVE)
        return b_even, b_odd
    else:
        b_values = load_tile(p_rows, o_w, row_mask, READ, ROWS, WIDTH, NATIVE).to(DTYPE)
        return b_values, b_values


@triton.jit
def _walk(
    p_blocks, p_k_head, p_v_head, b_q, b_q_odd, b_scale, b_max, b_sum, b_acc, b_acc_odd, begin, end, low, o_position,
    soft_cap, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    K_READ: tl.constexpr, K_ROWS: tl.constexpr, K_ALIGN: tl.constexpr,
    V_READ: tl.constexpr, V_ROWS: tl.constexpr, V_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr, PAIRS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The online softmax over cached tokens [begin, end). Without MASKED every row sees all of them, and they are
    whole tiles."""
    DTYPE: tl.constexpr = b_q.dtype
    MASK_ROWS: tl.constexpr = MASKED or WIDTH != BLOCK_W
    o_w = tl.arange(0, BLOCK_W)
    for i_n in tl.range(begin, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        n_mask = o_n < end
        if WINDOW > 0:
            n_mask = n_mask & (o_n >= low)
        i_block = tl.load(p_blocks + o_n // BLOCK_SIZE, mask=n_mask, other=0).to(tl.int64)
        p_k = row_pointers(p_k_head, i_block, o_n % BLOCK_SIZE, k_block_stride, k_token_stride, K_ALIGN)
        b_k, b_k_odd = _load_values(
            p_k[None, :], o_w[:, None], n_mask[None, :], K_READ, K_ROWS, WIDTH, NATIVE, PAIRS, MASK_ROWS, DTYPE
        )
        b_s = tl.dot(b_q, b_k, input_precision="ieee")
        if PAIRS:
            b_s = tl.dot(b_q_odd, b_k_odd, b_s, input_precision="ieee")
        if SOFT_CAP:
            b_s = _soft_cap(b_s * b_scale[:, None], soft_cap) * LOG2_E
        else:
            b_s = b_s * (b_scale * LOG2_E)[:, None]
        if MASKED:
            visible = n_mask[None, :]
            if CAUSAL:
                visible = visible & (o_n[None, :] <= o_position[:, None])
                if WINDOW > 0:
                    visible = visible & (o_n[None, :] > o_position[:, None] - WINDOW)
            b_s = tl.where(visible, b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        # A row that has seen nothing yet keeps -inf; 0 stands in, so that no -inf - -inf arises.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_fade = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_fade + tl.sum(b_p, axis=1)
        p_v = row_pointers(p_v_head, i_block, o_n % BLOCK_SIZE, v_block_stride, v_token_stride, V_ALIGN)
        b_v, b_v_odd = _load_values(
            p_v[:, None], o_w[None, :], n_mask[:, None], V_READ, V_ROWS, WIDTH, NATIVE, PAIRS, MASK_ROWS, DTYPE
        )
        b_p = b_p.to(DTYPE)
        b_acc = tl.dot(b_p, b_v, b_acc * b_fade[:, None], input_precision="ieee")
        if PAIRS:
            b_acc_odd = tl.dot(b_p, b_v_odd, b_acc_odd * b_fade[:, None], input_precision="ieee")
        b_max = b_new_max
    return b_max, b_sum, b_acc, b_acc_odd


@triton.jit
def _to_half(b_q, b_q_odd):
    """float32 rows of q as float16, each divided by the power of two at its largest value, and those powers."""
    b_most = tl.maximum(tl.max(tl.abs(b_q), axis=1), tl.max(tl.abs(b_q_odd), axis=1))
    # exponents 1 .. 253, so that the power and its reciprocal are both normal numbers
    b_bits = tl.minimum(tl.maximum(b_most.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23), 253 << 23)
    b_down = ((254 << 23) - b_bits).to(tl.float32, bitcast=True)
    b_up = b_bits.to(tl.float32, bitcast=True)
    return (b_q * b_down[:, None]).to(tl.float16), (b_q_odd * b_down[:, None]).to(tl.float16), b_up


@triton.jit(do_not_specialize=["first_sequence", "splits", "table_stride"])
def paged_attention_kernel(
    p_q,
    p_k_cache,
    p_v_cache,
    p_out,
    p_partial,
    p_partial_max,
    p_partial_sum,
    p_table,
    p_query_start,
    p_seq_lens,
    p_k_scale,
    p_v_scale,
    scale,
    soft_cap,
    first_sequence,
    splits,
    table_stride,
    q_stride,
    q_head_stride,
    k_block_stride,
    k_token_stride,
    k_row_stride,
    v_block_stride,
    v_token_stride,
    v_row_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    K_READ: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_READ: tl.constexpr,
    V_ROWS: tl.constexpr,
    V_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    PAIRS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tile of query tokens x split, KV head x tile of its query heads, sequence).

    A tile has TILE_HEADS of the GROUP query heads of a KV head (all of them unless they are too many for one tile).
    p_out is [tokens, HEADS, HEAD_DIM], contiguous; with SPLIT the unnormalised results go to p_partial
    [tokens, HEADS, splits, HEAD_DIM], with each row's running maximum (-inf: this split has nothing) and sum beside it.

    PAIRS: the caches point to 16-bit elements of two stored values each (strides count those), K_READ and V_READ give
    both as float16, and products are those of float16: every 8-bit value is one, while bfloat16 would cost a second
    conversion. CAUSAL: rows see different tokens (those of a decode do not). WHOLE: the tiles that all rows see are
    walked first, without masks.
    """
    wait_for_earlier(PDL)
    i_split = tl.program_id(0) % splits
    i_tile = tl.program_id(0) // splits
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    i_kv = tl.program_id(1) // HEAD_TILES
    i_sequence = tl.program_id(2) + first_sequence
    TOKENS: tl.constexpr = BLOCK_M // TILE_HEADS
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    BLOCK_W: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    i_start = tl.load(p_query_start + i_sequence)
    n_query = tl.load(p_query_start + i_sequence + 1) - i_start
    n_cached = tl.load(p_seq_lens + i_sequence)
    if i_tile * TOKENS < n_query:
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_local = i_tile * TOKENS + o_m // TILE_HEADS
        o_group = tl.program_id(1) % HEAD_TILES * TILE_HEADS + o_m % TILE_HEADS
        row_mask = (o_m < TOKENS * TILE_HEADS) & (o_local < n_query) & (o_group < GROUP)
        o_position = n_cached - n_query + o_local
        o_token = (i_start + o_local).to(tl.int64)
        o_head = i_kv * GROUP + o_group
        q_mask = row_mask[:, None] & (o_d < HEAD_DIM)[None, :]
        p_rows = p_q + o_token[:, None] * q_stride + o_head[:, None] * q_head_stride + o_d[None, :]
        b_q = tl.load(p_rows, mask=q_mask, other=0.0)
        b_q_odd = b_q
        b_scale = tl.zeros([BLOCK_M], tl.float32) + tl.load(p_k_scale + i_kv) * scale
        if PAIRS:
            b_q, b_q_odd = tl.split(tl.reshape(b_q, [BLOCK_M, BLOCK_W, 2]))
            b_q, b_q_odd, b_up = _to_half(b_q.to(tl.float32), b_q_odd.to(tl.float32))
            b_scale *= b_up

        # Cached tokens [low, high) are seen by some row of this tile; this split walks [begin, end).
        high = tl.minimum(n_cached, n_cached - n_query + (i_tile + 1) * TOKENS)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(n_cached - n_query + i_tile * TOKENS - WINDOW + 1, 0)
        first = low // BLOCK_N * BLOCK_N
        share = tl.cdiv(tl.cdiv(high - first, BLOCK_N), splits) * BLOCK_N
        begin = first + i_split * share
        end = tl.minimum(high, begin + share)

        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        b_acc_odd = b_acc
        p_blocks = p_table + i_sequence.to(tl.int64) * table_stride
        p_k_head = p_k_cache + tl.multiple_of(i_kv.to(tl.int64) * k_row_stride, K_ALIGN)
        p_v_head = p_v_cache + tl.multiple_of(i_kv.to(tl.int64) * v_row_stride, V_ALIGN)
        if WHOLE:
            whole = tl.maximum(begin, tl.minimum(end, n_cached - n_query + i_tile * TOKENS + 1) // BLOCK_N * BLOCK_N)
            b_max, b_sum, b_acc, b_acc_odd = _walk(
                p_blocks, p_k_head, p_v_head, b_q, b_q_odd, b_scale, b_max, b_sum, b_acc, b_acc_odd, begin, whole, low,
                o_position, soft_cap, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
                WIDTH, BLOCK_SIZE, WINDOW, SOFT_CAP, K_READ, K_ROWS, K_ALIGN, V_READ, V_ROWS, V_ALIGN,
                NATIVE, PAIRS, CAUSAL, False, BLOCK_N, BLOCK_W,
            )  # fmt: skip
            begin = whole
        b_max, b_sum, b_acc, b_acc_odd = _walk(
            p_blocks, p_k_head, p_v_head, b_q, b_q_odd, b_scale, b_max, b_sum, b_acc, b_acc_odd, begin, end, low,
            o_position, soft_cap, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            WIDTH, BLOCK_SIZE, WINDOW, SOFT_CAP, K_READ, K_ROWS, K_ALIGN, V_READ, V_ROWS, V_ALIGN,
            NATIVE, PAIRS, CAUSAL, True, BLOCK_N, BLOCK_W,
        )  # fmt: skip

        if PAIRS:
            b_out = tl.reshape(tl.join(b_acc, b_acc_odd), [BLOCK_M, BLOCK_D])
        else:
            b_out = b_acc
        o_row = o_token * HEADS + o_head
        if SPLIT:
            o_row = o_row * splits + i_split
            tl.store(p_partial_max + o_row, b_max, mask=row_mask)
            if begin < end:
                tl.store(p_partial_sum + o_row, b_sum, mask=row_mask)
                tl.store(p_partial + o_row[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=q_mask)
        else:
            b_out *= (tl.load(p_v_scale + i_kv) / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
            tl.store(p_out + o_row[:, None] * HEAD_DIM + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    p_partial,
    p_partial_max,
    p_partial_sum,
    p_out,
    p_v_scale,
    splits,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits, at most BLOCK_SPLITS, of one row (token, head). Grid (tokens * HEADS)."""
    wait_for_earlier(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    o_split = tl.arange(0, BLOCK_SPLITS)
    o_part = i_row * splits + o_split
    b_max = tl.load(p_partial_max + o_part, mask=o_split < splits, other=float("-inf"))
    # NaN counts as something
    there = (o_split < splits) & (b_max != float("-inf"))
    b_sum = tl.load(p_partial_sum + o_part, mask=there, other=0.0)
    p_acc = p_partial + o_part[:, None] * HEAD_DIM + o_d[None, :]
    b_acc = tl.load(p_acc, mask=there[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    b_top = tl.max(b_max, axis=0)
    b_weight = tl.exp2(b_max - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_total = tl.sum(b_sum * b_weight, axis=0)
    b_scale = tl.load(p_v_scale + (i_row % HEADS) // GROUP) / tl.where(b_total == 0.0, 1.0, b_total)
    b_out = tl.sum(b_acc * b_weight[:, None], axis=0) * b_scale
    tl.store(p_out + i_row * HEAD_DIM + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < HEAD_DIM)


@triton.jit(do_not_specialize=["low", "high"])
def gather_kernel(
    p_k_cache,
    p_v_cache,
    p_k_out,
    p_v_out,
    p_blocks,
    p_k_scale,
    p_v_scale,
    low,
    high,
    k_block_stride,
    k_token_stride,
    k_row_stride,
    v_block_stride,
    v_token_stride,
    v_row_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_READ: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_READ: tl.constexpr,
    V_ROWS: tl.constexpr,
    V_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Cached tokens [low, high) of one sequence, decoded and scaled, into dense [Hkv, high - low, HEAD_DIM] tensors.
    Grid (tile of tokens, KV head)."""
    i_kv = tl.program_id(1).to(tl.int64)
    o_local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_n = low + o_local
    o_d = tl.arange(0, BLOCK_D)[None, :]
    n_mask = (o_n < high)[:, None]
    i_block = tl.load(p_blocks + o_n // BLOCK_SIZE, mask=o_n < high, other=0).to(tl.int64)
    o_out = (i_kv * (high - low) + o_local)[:, None] * HEAD_DIM + o_d
    p_head = p_k_cache + tl.multiple_of(i_kv * k_row_stride, K_ALIGN)
    p_rows = row_pointers(p_head, i_block, o_n % BLOCK_SIZE, k_block_stride, k_token_stride, K_ALIGN)
    b_k = load_tile(p_rows[:, None], o_d, n_mask, K_READ, K_ROWS, HEAD_DIM, NATIVE).to(tl.float32)
    b_k *= tl.load(p_k_scale + i_kv)
    tl.store(p_k_out + o_out, b_k.to(p_k_out.dtype.element_ty), mask=n_mask & (o_d < HEAD_DIM))
    p_head = p_v_cache + tl.multiple_of(i_kv * v_row_stride, V_ALIGN)
    p_rows = row_pointers(p_head, i_block, o_n % BLOCK_SIZE, v_block_stride, v_token_stride, V_ALIGN)
    b_v = load_tile(p_rows[:, None], o_d, n_mask, V_READ, V_ROWS, HEAD_DIM, NATIVE).to(tl.float32)
    b_v *= tl.load(p_v_scale + i_kv)
    tl.store(p_v_out + o_out, b_v.to(p_v_out.dtype.element_ty), mask=n_mask & (o_d < HEAD_DIM))
