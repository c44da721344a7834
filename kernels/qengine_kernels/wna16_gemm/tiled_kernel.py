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

from qengine_kernels.overlap import wait_for_earlier
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
def _load_words(p_words, i_n, i_part, k, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Part i_part of ROWS neighbouring rows of tiles -> int16 [64 * ROWS, COLUMNS]; `tiles.py` explains the order."""
    PART: tl.constexpr = 64 * COLUMNS
    o = tl.arange(0, ROWS * PART)
    if ROWS == 1:
        b_words = tl.load(p_words + i_n.to(tl.int64) * k * 16 + i_part * PART + o)
    else:
        o_row = (i_n * ROWS + o // PART).to(tl.int64) * k * 16
        b_words = tl.load(p_words + o_row + i_part * PART + o % PART)
    b_words = tl.reshape(b_words, [ROWS, COLUMNS // 16, 4, 8, 4, 2, 2, 2])
    b_words = tl.permute(b_words, [0, 2, 6, 3, 1, 5, 4, 7])
    return tl.reshape(b_words, [ROWS * 64, COLUMNS])


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
def _in_turns(b_a, b_b, WIDTH: tl.constexpr):
    """[R, C] and [R, C] -> [R, 2 * C]: WIDTH columns of the one, then as many of the other, and so on."""
    b_both = tl.reshape(tl.join(b_a, b_b), [b_a.shape[0], b_a.shape[1] // WIDTH, WIDTH, 2])
    return tl.reshape(tl.permute(b_both, [0, 1, 3, 2]), [b_a.shape[0], 2 * b_a.shape[1]])


@triton.jit
def _meta(p_meta, i_k, o_n, n, GROUP: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """Scale, and what to add to codes, of the group of input i_k. GROUP 0: one for all of K."""
    i_group = 0 if GROUP == 0 else i_k // GROUP
    return _split_meta(tl.load(p_meta + i_group * n + o_n), SCALE, DTYPE)


@triton.jit
def _weights(
    p_words, p_meta, i_n, i_part, o_n, n, k, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Part i_part of a row of tiles -> [64 * ROWS, 4 * COLUMNS], the weight or without SCALED its codes less their
    zeros, and the scales float32 [64 * ROWS] of the codes. A part lies in one group, or has one tile and is SCALED."""
    i_k = i_part * (4 * COLUMNS)
    b_words = _load_words(p_words, i_n, i_part, k, COLUMNS, ROWS)
    b_scale, b_minus = _meta(p_meta, i_k, o_n, n, GROUP, SCALE, DTYPE)
    b_0 = _codes(b_words, b_minus, 0, ASM)
    if SCALED:
        b_0 = _scaled(b_0, b_scale, ASM)
    if GROUP == 16:
        b_scale, b_minus = _meta(p_meta, i_k + 16, o_n, n, GROUP, SCALE, DTYPE)
    b_1 = _codes(b_words, b_minus, 1, ASM)
    if SCALED:
        b_1 = _scaled(b_1, b_scale, ASM)
    if GROUP == 16 or GROUP == 32:
        b_scale, b_minus = _meta(p_meta, i_k + 32, o_n, n, GROUP, SCALE, DTYPE)
    b_2 = _codes(b_words, b_minus, 2, ASM)
    if SCALED:
        b_2 = _scaled(b_2, b_scale, ASM)
    if GROUP == 16:
        b_scale, b_minus = _meta(p_meta, i_k + 48, o_n, n, GROUP, SCALE, DTYPE)
    b_3 = _codes(b_words, b_minus, 3, ASM)
    if SCALED:
        b_3 = _scaled(b_3, b_scale, ASM)
    return _in_turns(_in_turns(b_0, b_1, 16), _in_turns(b_2, b_3, 16), 32), b_scale


@triton.jit
def _few(
    p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, k, x_stride,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of a group's codes are scaled, not the codes: the fewest operations a code, while there are few rows of x.
    Products are 8 rows of x wide, which Triton gives to the plain matrix instructions: they wait for less."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    TWO: tl.constexpr = BLOCK_M == 16
    SCALED: tl.constexpr = GROUP > 0 and GROUP < 64
    o_n = i_n * (64 * ROWS) + tl.arange(0, 64 * ROWS)
    o_m = i_m * BLOCK_M + tl.arange(0, 8)
    p_part = p_x + o_m.to(tl.int64)[None, :] * x_stride + tl.arange(0, 4 * COLUMNS)[:, None]
    x_mask = (o_m < m)[None, :]
    x_mask_2 = (o_m + 8 < m)[None, :]
    b_acc = tl.zeros([64 * ROWS, 8], tl.float32)
    b_acc_2 = b_acc
    for i in tl.range(begin, end, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            i_part = i * PARTS + part
            b_w, b_scale = _weights(
                p_words, p_meta, i_n, i_part, o_n, n, k, COLUMNS, GROUP, SCALE, ROWS, SCALED, ASM, DTYPE
            )
            p_now = p_part + i_part * (4 * COLUMNS)
            b_sum = tl.dot(b_w, tl.load(p_now, mask=x_mask, other=0.0), input_precision="ieee")
            b_acc += b_sum if SCALED else b_sum * b_scale[:, None]
            if TWO:
                b_x = tl.load(p_now + 8 * x_stride, mask=x_mask_2, other=0.0)
                b_sum = tl.dot(b_w, b_x, input_precision="ieee")
                b_acc_2 += b_sum if SCALED else b_sum * b_scale[:, None]
    if TWO:
        return _in_turns(b_acc, b_acc_2, 8)
    else:
        return b_acc


@triton.jit
def _finished(b_acc):
    """b_acc, once the matrix units have added to it. Without this, Triton 3.6 and 3.7 leave products whose left operand
    is in registers under way on sm_90, and the next step's codes are decoded into those very registers: machine code of
    all these tiles does so where one group has all of K (sums of wide ones were wrong); elsewhere ptxas may happen to
    wait."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _many(
    p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, k, x_stride,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, ASM: tl.constexpr, FINISH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One product a step; with FINISH nothing of it is left to be done when the next codes are decoded."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    STEP: tl.constexpr = 4 * COLUMNS * PARTS
    o_n = i_n * (64 * ROWS) + tl.arange(0, 64 * ROWS)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    p_step = p_x + o_m.to(tl.int64)[None, :] * x_stride + tl.arange(0, STEP)[:, None]
    x_mask = (o_m < m)[None, :]
    b_acc = tl.zeros([64 * ROWS, BLOCK_M], tl.float32)
    for i in tl.range(begin, end, num_stages=STAGES):
        b_w, _ = _weights(
            p_words, p_meta, i_n, i * PARTS, o_n, n, k, COLUMNS, GROUP, SCALE, ROWS, True, ASM, DTYPE
        )
        if PARTS == 2:
            b_2, _ = _weights(
                p_words, p_meta, i_n, i * PARTS + 1, o_n, n, k, COLUMNS, GROUP, SCALE, ROWS, True, ASM, DTYPE
            )
            b_w = _in_turns(b_w, b_2, 4 * COLUMNS)
        b_x = tl.load(p_step + i * STEP, mask=x_mask, other=0.0)
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
        if FINISH:
            b_acc = _finished(b_acc)
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
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, SWATH: tl.constexpr, FEW: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr, FINISH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (output tiles, splits of K). A step along K takes PARTS times COLUMNS columns of words, 4 inputs each; a
    split takes `share` steps. p_parts and p_tickets are those of `split_k.join_parts`."""
    wait_for_earlier(PDL)
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    i_n, i_m = _place(i_tile, m, n, BLOCK_M, 64 * ROWS, SWATH)
    begin = 0
    end = k // (4 * COLUMNS * PARTS)
    if SPLIT:
        begin = i_split * share
        end = tl.minimum(begin + share, end)
    if FEW:
        b_acc = _few(
            p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, k, x_stride,
            PARTS, COLUMNS, GROUP, SCALE, ROWS, BLOCK_M, ASM, STAGES,
        )  # fmt: skip
    else:
        b_acc = _many(
            p_x, p_words, p_meta, i_n, i_m, begin, end, m, n, k, x_stride,
            PARTS, COLUMNS, GROUP, SCALE, ROWS, BLOCK_M, ASM, FINISH, STAGES,
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
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Outputs from 64 * ROWS * first on, dense: p_out [outputs, K]. Grid (part of K, tile of N)."""
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    i_part = tl.program_id(0)
    i_local = tl.program_id(1)
    i_n = i_local + first
    o_n = tl.arange(0, 64 * ROWS)
    b_w, _ = _weights(
        p_words, p_meta, i_n, i_part, i_n * (64 * ROWS) + o_n, n, k, COLUMNS, GROUP, SCALE, ROWS, True, ASM, DTYPE
    )
    p_rows = p_out + (i_local * (64 * ROWS) + o_n).to(tl.int64)[:, None] * k + i_part * (4 * COLUMNS)
    tl.store(p_rows + tl.arange(0, 4 * COLUMNS)[None, :], b_w)
