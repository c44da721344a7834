"""Triton device functions of `int8` rows; what a row is, is said in `qengine_kv_int8`."""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a small float32 and taking it off again rounds to an integer, ties to even."""


@triton.jit
def store_row(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """See `qengine.plugin.KVRowFunctions`."""
    SCALE_AT: tl.constexpr = (HEAD_DIM + 3) // 4 * 4
    o_dim = tl.arange(0, x.shape[1])[None, :]
    b_top = tl.max(tl.abs(x), axis=1)[:, None]
    # The maximum may pass over a NaN.
    b_bad = tl.max((x != x).to(tl.int32), axis=1)[:, None] > 0
    b_top = tl.where(b_bad, float("nan"), b_top)
    b_code = x * tl.where(b_top > 0.0, 127.0 / b_top, 0.0)
    b_code = tl.where(b_code == b_code, (b_code + ROUND) - ROUND, 0.0)
    b_code = tl.minimum(tl.maximum(b_code, -127.0), 127.0)
    tl.store(p_rows + o_dim, b_code.to(tl.int8), mask=row_mask & (o_dim < HEAD_DIM))
    p_scale = (p_rows + SCALE_AT).to(tl.pointer_type(tl.float32))
    tl.store(p_scale, b_top * (1.0 / 127.0), mask=row_mask)


@triton.jit
def load_row(p_rows, o_dim, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """See `qengine.plugin.KVRowFunctions`."""
    SCALE_AT: tl.constexpr = (HEAD_DIM + 3) // 4 * 4
    b_scale = tl.load((p_rows + SCALE_AT).to(tl.pointer_type(tl.float32)), mask=row_mask, other=0.0)
    b_code = tl.load(p_rows + o_dim, mask=row_mask & (o_dim < HEAD_DIM), other=0)
    return b_code.to(tl.float32) * b_scale
