"""Kernels over 4-bit codes in tiles (see `tiles.py`): the weight is the left operand of `tl.dot`, dequantised in
registers.

A program computes [BLOCK_N, BLOCK_M] of y transposed. Words arrive in the very order in which the matrix units want
their operand, so nothing is exchanged between threads: a tile is one contiguous copy, and two or three operations turn
a pair of codes into a pair of numbers. With ASM those work on pairs in one 32-bit register; without it (Triton's
interpreter) the same is written in plain operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qengine_kernels.overlap import fetch_ahead, wait_for_earlier
from qengine_kernels.split_k import join_parts


def _pairs(base: int, add: str) -> tl.constexpr:
    """For each slot: code pair -> base + code as a float pair (or-ed into the fraction), plus operand 2."""
    shifts = ("mov.b32 t, $1;", "shr.b32 t, $1, 4;", "shr.b32 t, $1, 8;", "shr.b32 t, $1, 12;")
    return tl.constexpr(
        tuple(f"{{ .reg .b32 t, c; {shift} lop3.b32 t, t, 0x000f000f, {base:#x}, 0xEA; {add} }}" for shift in shifts)
    )


BF16_PAIRS = _pairs(0x43004300, "mov.b32 c, 0x3f803f80; fma.rn.bf16x2 $0, t, c, $2;")
FP16_PAIRS = _pairs(0x64006400, "add.f16x2 $0, t, $2;")
BF16_PRODUCT = tl.constexpr("{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, $1, $2, c; }")
FP16_PRODUCT = tl.constexpr("mul.f16x2 $0, $1, $2;")


@triton.jit
def _load_words(p_words, i_n, i_step, tiles, P: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr):
    """Step i_step of ROWS neighbouring rows of tiles -> int16 [64 * ROWS, Q]; `tiles.py` explains the order."""
    PART: tl.constexpr = 64 * Q
    o = tl.arange(0, ROWS * PART)
    if ROWS == 1:
        b_words = tl.load(p_words + i_n.to(tl.int64) * tiles * (64 * P) + i_step * PART + o)
    else:
        o_row = (i_n * ROWS + o // PART).to(tl.int64) * tiles * (64 * P)
        b_words = tl.load(p_words + o_row + i_step * PART + o % PART)
    b_words = tl.reshape(b_words, [ROWS, Q // 16, 4, 8, 4, 2, 2, 2])
    b_words = tl.permute(b_words, [0, 2, 6, 3, 1, 5, 4, 7])
    return tl.reshape(b_words, [ROWS * 64, Q])


@triton.jit
def _split_meta(b_meta, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """int32 (bits of a scale of dtype SCALE | zero << 16) -> the scale in float32, and what to add to BASE + code, in
    DTYPE."""
    BASE: tl.constexpr = 1024.0 if DTYPE.is_fp16() else 128.0
    if SCALE.is_fp16():
        b_scale = (b_meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        b_scale = (b_meta << 16).to(tl.float32, bitcast=True)
    return b_scale, (-BASE - (b_meta >> 16).to(tl.float32)).to(DTYPE)


@triton.jit
def _codes(b_words, b_minus, SLOT: tl.constexpr, ASM: tl.constexpr):
    """The codes in one slot less their zeros, exact, in b_minus's dtype; b_minus has one row for each output."""
    DTYPE: tl.constexpr = b_minus.dtype
    b_minus = tl.broadcast_to(b_minus[:, None], b_words.shape)
    if not ASM:
        BASE: tl.constexpr = 1024.0 if DTYPE.is_fp16() else 128.0
        return (((b_words >> (4 * SLOT)) & 0xF).to(tl.float32) + BASE + b_minus.to(tl.float32)).to(DTYPE)
    elif DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            BF16_PAIRS[SLOT], "=r,r,r", [b_words, b_minus], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            FP16_PAIRS[SLOT], "=r,r,r", [b_words, b_minus], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _scaled(b_codes, b_scale, ASM: tl.constexpr):
    """b_codes times its row's float32 scale, rounded to b_codes's dtype."""
    DTYPE: tl.constexpr = b_codes.dtype
    if not ASM:
        return (b_codes.to(tl.float32) * b_scale[:, None]).to(DTYPE)
    else:
        b_scale = tl.broadcast_to(b_scale.to(DTYPE)[:, None], b_codes.shape)
        if DTYPE.is_bf16():
            return tl.inline_asm_elementwise(
                BF16_PRODUCT, "=r,r,r", [b_codes, b_scale], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                FP16_PRODUCT, "=r,r,r", [b_codes, b_scale], dtype=tl.float16, is_pure=True, pack=2
            )


@triton.jit
def _beside(b_a, b_b):
    """[R, P] and [R, P] -> [R, 2 * P]."""
    return tl.reshape(tl.permute(tl.join(b_a, b_b), [0, 2, 1]), [b_a.shape[0], 2 * b_a.shape[1]])


@triton.jit
def _meta(
    p_meta, i_step, o_n, n, SLOT: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of one slot in a step: a group has whole tiles or whole slots. GROUP 0: one for all of K."""
    i_tile = i_step // (P // Q)
    if GROUP == 0:
        i_group = 0
    elif GROUP >= 4 * P:
        i_group = i_tile // (GROUP // (4 * P))
    else:
        i_group = i_tile * (4 * P // GROUP) + SLOT * P // GROUP
    return _split_meta(tl.load(p_meta + i_group * n + o_n), SCALE, DTYPE)


@triton.jit
def _fetch_weight(
    p_words, p_meta, i_n, begin, end, tiles, n,
    P: tl.constexpr, Q: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Asks for the first AHEAD steps' words, scales and zeros; a split that has fewer steps asks for some twice."""
    PART: tl.constexpr = 64 * Q
    o = tl.arange(0, AHEAD * PART // 64) * 64
    o = begin * PART + tl.where(o < (end - begin) * PART, o, 0)
    for row in tl.static_range(ROWS):
        fetch_ahead(p_words + (i_n * ROWS + row).to(tl.int64) * tiles * (64 * P) + o)
    if GROUP > 0:
        o_n = i_n * (64 * ROWS) + tl.arange(0, 2 * ROWS) * 32
        GROUPS: tl.constexpr = (AHEAD * 4 * Q + GROUP - 1) // GROUP
        for i in tl.static_range(GROUPS):
            fetch_ahead(p_meta + tl.minimum(begin * (4 * Q) // GROUP + i, (end * (4 * Q) - 1) // GROUP) * n + o_n)


@triton.jit
def _few(
    p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, x_stride, tiles,
    P: tl.constexpr, Q: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of a group's codes are scaled, not the codes: the fewest operations a code, while there are few rows of x.
    Products are 8 rows of x wide, which Triton gives to the plain matrix instructions: they wait for less."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    TWO: tl.constexpr = BLOCK_M == 16
    o_n = i_n * (64 * ROWS) + tl.arange(0, 64 * ROWS)
    o_m = i_m * BLOCK_M + tl.arange(0, 8)
    p_slice = p_x + o_m.to(tl.int64)[None, :] * x_stride + tl.arange(0, Q)[:, None]
    p_slice_2 = p_slice + 8 * x_stride
    x_mask = (o_m < m)[None, :]
    x_mask_2 = (o_m + 8 < m)[None, :]
    b_acc = tl.zeros([64 * ROWS, 8], tl.float32)
    b_acc_2 = b_acc
    for i in tl.range(begin, end, num_stages=STAGES):
        b_words = _load_words(p_words, i_n, i, tiles, P, Q, ROWS)
        b_sum = tl.zeros([64 * ROWS, 8], tl.float32)
        b_sum_2 = b_sum
        b_scale, b_minus = _meta(p_meta, i, o_n, n, 0, P, Q, GROUP, SCALE, DTYPE)
        i_k = i // (P // Q) * (4 * P) + i % (P // Q) * Q
        for SLOT in tl.static_range(4):
            if SLOT > 0 and GROUP > 0 and SLOT * P % GROUP == 0:
                b_acc += b_sum * b_scale[:, None]
                b_sum = tl.zeros([64 * ROWS, 8], tl.float32)
                if TWO:
                    b_acc_2 += b_sum_2 * b_scale[:, None]
                    b_sum_2 = b_sum
                b_scale, b_minus = _meta(p_meta, i, o_n, n, SLOT, P, Q, GROUP, SCALE, DTYPE)
            b_codes = _codes(b_words, b_minus, SLOT, ASM)
            b_x = tl.load(p_slice + i_k + SLOT * P, mask=x_mask, other=0.0)
            b_sum = tl.dot(b_codes, b_x, b_sum, input_precision="ieee")
            if TWO:
                b_x = tl.load(p_slice_2 + i_k + SLOT * P, mask=x_mask_2, other=0.0)
                b_sum_2 = tl.dot(b_codes, b_x, b_sum_2, input_precision="ieee")
        b_acc += b_sum * b_scale[:, None]
        if TWO:
            b_acc_2 += b_sum_2 * b_scale[:, None]
    if TWO:
        return _beside(b_acc, b_acc_2)
    else:
        return b_acc


@triton.jit
def _many(
    p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, x_stride, tiles,
    P: tl.constexpr, Q: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One product a step, so that Triton leaves the matrix units at work while the next codes are decoded."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    o_n = i_n * (64 * ROWS) + tl.arange(0, 64 * ROWS)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, 4 * Q)
    p_slices = p_x + o_m.to(tl.int64)[None, :] * x_stride + (o_k // Q * P + o_k % Q)[:, None]
    x_mask = (o_m < m)[None, :]
    b_acc = tl.zeros([64 * ROWS, BLOCK_M], tl.float32)
    for i in tl.range(begin, end, num_stages=STAGES):
        b_words = _load_words(p_words, i_n, i, tiles, P, Q, ROWS)
        b_scale, b_minus = _meta(p_meta, i, o_n, n, 0, P, Q, GROUP, SCALE, DTYPE)
        b_0 = _scaled(_codes(b_words, b_minus, 0, ASM), b_scale, ASM)
        if GROUP > 0 and P % GROUP == 0:
            b_scale, b_minus = _meta(p_meta, i, o_n, n, 1, P, Q, GROUP, SCALE, DTYPE)
        b_1 = _scaled(_codes(b_words, b_minus, 1, ASM), b_scale, ASM)
        if GROUP > 0 and 2 * P % GROUP == 0:
            b_scale, b_minus = _meta(p_meta, i, o_n, n, 2, P, Q, GROUP, SCALE, DTYPE)
        b_2 = _scaled(_codes(b_words, b_minus, 2, ASM), b_scale, ASM)
        if GROUP > 0 and P % GROUP == 0:
            b_scale, b_minus = _meta(p_meta, i, o_n, n, 3, P, Q, GROUP, SCALE, DTYPE)
        b_3 = _scaled(_codes(b_words, b_minus, 3, ASM), b_scale, ASM)
        i_k = i // (P // Q) * (4 * P) + i % (P // Q) * Q
        b_x = tl.load(p_slices + i_k, mask=x_mask, other=0.0)
        b_acc = tl.dot(_beside(_beside(b_0, b_1), _beside(b_2, b_3)), b_x, b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _store(
    p_out, p_bias, b_acc, i_n, i_m, m, n, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, HAS_BIAS: tl.constexpr
):
    o_n = i_n * (64 * ROWS) + tl.arange(0, 64 * ROWS)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n).to(tl.float32)[:, None]
    p_y = p_out + o_m.to(tl.int64)[None, :] * n + o_n[:, None]
    tl.store(p_y, b_acc.to(p_out.dtype.element_ty), mask=(o_m < m)[None, :])


@triton.jit
def _place(i_tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWATH: tl.constexpr):
    """Number of an output tile -> (tile of N, tile of M), SWATH tiles of N at a time, so that programs that run
    together share what they read."""
    rows = tl.cdiv(m, BLOCK_M)
    first = i_tile // (SWATH * rows) * SWATH
    width = tl.minimum(n // BLOCK_N - first, SWATH)
    i_local = i_tile - first * rows
    return first + i_local % width, i_local // width


@triton.jit(do_not_specialize=["m", "share"])
def tiled_kernel(
    p_x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, m, n, k, x_stride, share,
    P: tl.constexpr, Q: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, SWATH: tl.constexpr, FEW: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (output tiles, splits of K). A step along K takes Q of the P columns of a tile's words, 4 * Q inputs; a
    split takes `share` steps. p_parts and p_tickets are those of `split_k.join_parts`. The weight of the first AHEAD
    steps is on its way before x has to be there (with PDL; 0: not)."""
    tiles = k // (4 * P)
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    i_n, i_m = _place(i_tile, m, n, BLOCK_M, 64 * ROWS, SWATH)
    begin = 0
    end = k // (4 * Q)
    if SPLIT:
        begin = i_split * share
        end = tl.minimum(begin + share, end)
    if PDL and AHEAD > 0:
        _fetch_weight(p_words, p_meta, i_n, begin, end, tiles, n, P, Q, GROUP, ROWS, AHEAD)
    wait_for_earlier(PDL)
    if FEW:
        b_acc = _few(
            p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, x_stride, tiles,
            P, Q, GROUP, SCALE, ROWS, BLOCK_M, ASM, STAGES,
        )  # fmt: skip
    else:
        b_acc = _many(
            p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, x_stride, tiles,
            P, Q, GROUP, SCALE, ROWS, BLOCK_M, ASM, STAGES,
        )  # fmt: skip
    if SPLIT:
        UNROLL: tl.constexpr = 4 if BLOCK_M <= 32 else 1
        done, b_sum = join_parts(p_parts, p_tickets, b_acc, i_tile, i_split, tl.num_programs(1), UNROLL)
        if done:
            _store(p_out, p_bias, b_sum, i_n, i_m, m, n, ROWS, BLOCK_M, HAS_BIAS)
    else:
        _store(p_out, p_bias, b_acc, i_n, i_m, m, n, ROWS, BLOCK_M, HAS_BIAS)


@triton.jit(do_not_specialize=["first"])
def tiled_dequantize_kernel(
    p_words, p_meta, p_out, n, k, first,
    P: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Outputs from 64 * ROWS * first on, dense: p_out [outputs, K]. Grid (tile of K, tile of N)."""
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    i_tile = tl.program_id(0)
    i_local = tl.program_id(1)
    i_n = i_local + first
    o_n = tl.arange(0, 64 * ROWS)
    b_words = _load_words(p_words, i_n, i_tile, k // (4 * P), P, P, ROWS)
    p_rows = p_out + (i_local * (64 * ROWS) + o_n).to(tl.int64)[:, None] * k + i_tile * (4 * P)
    for SLOT in tl.static_range(4):
        b_scale, b_minus = _meta(p_meta, i_tile, i_n * (64 * ROWS) + o_n, n, SLOT, P, P, GROUP, SCALE, DTYPE)
        b_w = _scaled(_codes(b_words, b_minus, SLOT, ASM), b_scale, ASM)
        tl.store(p_rows + SLOT * P + tl.arange(0, P)[None, :], b_w)
