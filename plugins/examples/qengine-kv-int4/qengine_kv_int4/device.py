"""Triton device functions of `int4` rows; what a row is, is said in `qengine_kv_int4`."""

from __future__ import annotations

import triton
import triton.language as tl

KEY_GROUP = tl.constexpr(32)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a small float32 and taking it off again rounds to an integer, ties to even."""


@triton.jit
def _store(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):
    """GROUP, a power of two that divides x's width, is the number of columns that share a scale and a zero."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = WIDTH // GROUP
    CODE_BYTES: tl.constexpr = (HEAD_DIM + 7) // 8 * 4
    inside = tl.arange(0, WIDTH)[None, :] < HEAD_DIM
    # Columns behind the vector must not be an extreme of a group that they share with it.
    b_low = tl.min(tl.reshape(tl.where(inside, x, float("inf")), [ROWS, GROUPS, GROUP]), axis=2)
    b_high = tl.max(tl.reshape(tl.where(inside, x, float("-inf")), [ROWS, GROUPS, GROUP]), axis=2)
    # The extremes may pass over a NaN.
    b_bad = tl.max(tl.reshape((x != x).to(tl.int32), [ROWS, GROUPS, GROUP]), axis=2) > 0
    b_zero = tl.where(b_bad, float("nan"), b_low).to(tl.float16)
    b_scale = ((b_high - b_zero.to(tl.float32)) * (1.0 / 15.0)).to(tl.float16)
    b_inverse = tl.where(b_scale > 0.0, 1.0 / b_scale.to(tl.float32), 0.0)
    b_code = (tl.reshape(x, [ROWS, GROUPS, GROUP]) - b_zero.to(tl.float32)[:, :, None]) * b_inverse[:, :, None]
    b_code = tl.where(b_code == b_code, (b_code + ROUND) - ROUND, 0.0)
    b_code = tl.where(inside, tl.reshape(tl.minimum(tl.maximum(b_code, 0.0), 15.0), [ROWS, WIDTH]), 0.0)
    b_halves = tl.permute(tl.reshape(b_code.to(tl.int32), [ROWS, WIDTH // 8, 2, 4]), [0, 1, 3, 2])
    b_lower, b_upper = tl.split(b_halves)
    b_packed = tl.reshape(b_lower | (b_upper << 4), [ROWS, WIDTH // 2])
    o_byte = tl.arange(0, WIDTH // 2)[None, :]
    tl.store(p_rows + o_byte, b_packed.to(tl.uint8), mask=row_mask & (o_byte < CODE_BYTES))
    o_group = tl.arange(0, GROUPS)[None, :]
    p_pair = (p_rows + CODE_BYTES + 4 * o_group).to(tl.pointer_type(tl.float16))
    group_mask = row_mask & (o_group * GROUP < HEAD_DIM)
    tl.store(p_pair, b_scale, mask=group_mask)
    tl.store(p_pair + 1, b_zero, mask=group_mask)


@triton.jit
def _pair(p_pair, mask):
    """Scale and zero in one load of four bytes, both float32; 0 where masked."""
    b_pair = tl.load(p_pair.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
    b_scale = (b_pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    b_zero = (b_pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return b_scale.to(tl.float32), b_zero.to(tl.float32)


@triton.jit
def _codes(p_rows, o_dim, mask):
    b_byte = tl.load(p_rows + (o_dim // 8 * 4 + o_dim % 4), mask=mask, other=0)
    return ((b_byte.to(tl.int32) >> (o_dim // 4 % 2 * 4)) & 15).to(tl.float32)


@triton.jit
def store_keys(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """See `qengine.plugin.KVRowFunctions`."""
    _store(x, p_rows, row_mask, HEAD_DIM, x.shape[1] if x.shape[1] < KEY_GROUP else KEY_GROUP)


@triton.jit
def store_values(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """See `qengine.plugin.KVRowFunctions`."""
    _store(x, p_rows, row_mask, HEAD_DIM, x.shape[1])


@triton.jit
def load_keys(p_rows, o_dim, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """See `qengine.plugin.KVRowFunctions`."""
    CODE_BYTES: tl.constexpr = (HEAD_DIM + 7) // 8 * 4
    b_scale, b_zero = _pair(p_rows + CODE_BYTES, row_mask)
    # Each group's pair is loaded once for a row and then chosen; loading it for each value would be more bytes than
    # the values are.
    for i in tl.static_range(1, (HEAD_DIM + KEY_GROUP - 1) // KEY_GROUP):
        b_next_scale, b_next_zero = _pair(p_rows + CODE_BYTES + 4 * i, row_mask)
        b_scale = tl.where(o_dim >= i * KEY_GROUP, b_next_scale, b_scale)
        b_zero = tl.where(o_dim >= i * KEY_GROUP, b_next_zero, b_zero)
    mask = row_mask & (o_dim < HEAD_DIM)
    return tl.where(mask, _codes(p_rows, o_dim, mask) * b_scale + b_zero, 0.0)


@triton.jit
def load_values(p_rows, o_dim, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """See `qengine.plugin.KVRowFunctions`."""
    b_scale, b_zero = _pair(p_rows + (HEAD_DIM + 7) // 8 * 4, row_mask)
    mask = row_mask & (o_dim < HEAD_DIM)
    return tl.where(mask, _codes(p_rows, o_dim, mask) * b_scale + b_zero, 0.0)
