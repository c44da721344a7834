"""The kernel of a decode step's attention: rotate, store K and V, attend. Imports numba (see `scalar`).

Scratch memory is addressed like everything else: views of numpy's own arrays would be counted references, whose
counting costs more than the work on a row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from qengine_kernels.cpu_fused.scalar import (
    REORDER,
    bfloat16_bits,
    bits_of,
    bytes_at,
    exp,
    float_of,
    floats_at,
    halves_at,
    ints_at,
    longs_at,
    read_row,
    tanh,
    words_at,
    write_row,
)

AT, WIDTH, TOKEN, HEAD, CODES, VALUES, SCALE, INVERSE = range(8)
"""Places in the description of K or V (`decode.FusedDecode`): the side's first byte in a block; bytes of an element;
elements from token to token and from head to head; addresses of its tables (`tables`), and of its scales and their
inverses, float32 [num_kv_heads]."""


@njit
def rotated(address, half, row, dim, cos, sin, turning, factor):
    """row = the vector at `address`, its first 2 * turning elements rotated, times `factor`; all by address."""
    x, cosines, sines = floats_at(row, dim), floats_at(cos, turning), floats_at(sin, turning)
    read_row(address, half, x, dim)
    for d in range(turning):
        a, b = x[d], x[d + turning]
        x[d] = a * cosines[d] - b * sines[d]
        x[d + turning] = b * cosines[d] + a * sines[d]
    for d in range(dim):
        x[d] *= factor


@njit
def store(row, dim, address, width, codes):
    """The float32 vector at `row` as stored elements of `width` bytes: of one byte by the table at `codes` (uint32
    [65536]), of two as bfloat16, of four as they are."""
    x = floats_at(row, dim)
    if width == 1:
        target, table = bytes_at(address, dim), words_at(codes, 65536)
        for i in range(dim):
            bits = bits_of(x[i])
            entry = table[bits >> np.uint32(16)]
            above = (bits & np.uint32(0xFFFF)) >= (entry >> np.uint32(16))
            target[i] = np.uint8((entry >> np.uint32(8)) if above else entry)
    elif width == 2:
        pairs = halves_at(address, dim)
        for i in range(dim):
            pairs[i] = bfloat16_bits(x[i])
    else:
        values = floats_at(address, dim)
        for i in range(dim):
            values[i] = x[i]


@njit(forceinline=True)
def load(row, dim, address, width, values):
    """What `store` has written, as float32 at `row`; `values` (float32 [256]) decodes elements of one byte."""
    x = floats_at(row, dim)
    if width == 1:
        source, table = bytes_at(address, dim), floats_at(values, 256)
        for i in range(dim):
            x[i] = table[source[i]]
    elif width == 2:
        pairs = halves_at(address, dim)
        for i in range(dim):
            x[i] = float_of(np.uint32(pairs[i]) << np.uint32(16))
    else:
        floats = floats_at(address, dim)
        for i in range(dim):
            x[i] = floats[i]


@njit(fastmath=REORDER, error_model="numpy", forceinline=True)
def product(a, b, dim):
    x, y = floats_at(a, dim), floats_at(b, dim)
    total = np.float32(0.0)
    for d in range(dim):
        total += x[d] * y[d]
    return total


@njit(fastmath=REORDER, error_model="numpy", forceinline=True)
def accumulate(sums, weight, row, dim):
    x, y = floats_at(sums, dim), floats_at(row, dim)
    for d in range(dim):
        x[d] += weight * y[d]


@njit(fastmath=REORDER)
def total_of(x, count):
    total = np.float32(0.0)
    for j in range(count):
        total += x[j]
    return total


@njit(error_model="numpy")
def soften(scores, count, cap, factor):
    """The scores of one head at an address -> their softmax times `factor`; cap 0: none."""
    x = floats_at(scores, count)
    if cap > 0:
        for j in range(count):
            x[j] = tanh(x[j] / cap) * cap
    most = x[0]
    for j in range(count):
        most = x[j] if x[j] > most else most
    for j in range(count):
        x[j] = exp(x[j] - most)
    scale = factor / total_of(x, count)
    for j in range(count):
        x[j] *= scale


@njit(error_model="numpy")
def load_block(tile, dim, place, side, head, start, stop):
    """Rows start..stop-1 of a head in the block at `place`, decoded one after the other into `tile`.

    A row is not used at once: it is written by element, and reading it by vector before it has reached the cache
    would stall.
    """
    width, step = side[WIDTH], side[TOKEN] * side[WIDTH]
    first = place + side[AT] + head * side[HEAD] * width
    for i in range(start, stop):
        load(tile + (i - start) * dim * 4, dim, first + i * step, width, side[VALUES])


@njit(error_model="numpy")
def over_tokens(keys, vectors, group, dim, cells, side, head, weights, tile):
    """keys: weights[g, j] = vectors[g] . key of token first + j; else vectors[g] = sum of weights[g, j] * its value."""
    table, block_size, first, length, storage, block_bytes = cells
    count = length - first
    for block in range(first // block_size, (length + block_size - 1) // block_size):
        base = block * block_size
        start, stop = max(first - base, 0), min(length - base, block_size)
        load_block(tile, dim, storage + table[block] * block_bytes, side, head, start, stop)
        for g in range(group):
            x = floats_at(weights + (g * count + base + start - first) * 4, stop - start)
            vector = vectors + g * dim * 4
            if keys:
                for i in range(stop - start):
                    x[i] = product(vector, tile + i * dim * 4, dim)
            else:
                for i in range(stop - start):
                    accumulate(vector, x[i], tile + i * dim * 4, dim)


@njit(error_model="numpy")
def store_token(qk, qk_half, v, v_half, shape, angles, place, offset, k_side, v_side, row):
    """Rotate one token's keys and store them and its values, scaled, in the block at `place`."""
    heads, kv_heads, dim = shape
    cos, sin, turning = angles
    for h in range(kv_heads):
        at = qk + (heads + h) * dim * (2 if qk_half else 4)
        rotated(at, qk_half, row, dim, cos, sin, turning, floats_at(k_side[INVERSE], kv_heads)[h])
        to = place + k_side[AT] + (offset * k_side[TOKEN] + h * k_side[HEAD]) * k_side[WIDTH]
        store(row, dim, to, k_side[WIDTH], k_side[CODES])
        at = v + h * dim * (2 if v_half else 4)
        rotated(at, v_half, row, dim, cos, sin, 0, floats_at(v_side[INVERSE], kv_heads)[h])
        to = place + v_side[AT] + (offset * v_side[TOKEN] + h * v_side[HEAD]) * v_side[WIDTH]
        store(row, dim, to, v_side[WIDTH], v_side[CODES])


@njit(error_model="numpy")
def attend_token(qk, qk_half, shape, angles, cells, k_side, v_side, scale, cap, out, out_half, row):
    """out [heads, dim] = one token's attention over its sequence's stored tokens. Scratch follows `row`."""
    heads, kv_heads, dim = shape
    cos, sin, turning = angles
    group, count = heads // kv_heads, cells[3] - cells[2]
    queries = row + cells[1] * dim * 4
    sums = queries + group * dim * 4
    scores = sums + group * dim * 4
    for h in range(kv_heads):
        factor = scale * floats_at(k_side[SCALE], kv_heads)[h]
        for g in range(group):
            at = qk + (h * group + g) * dim * (2 if qk_half else 4)
            rotated(at, qk_half, queries + g * dim * 4, dim, cos, sin, turning, factor)
        over_tokens(True, queries, group, dim, cells, k_side, h, scores, row)
        for g in range(group):
            soften(scores + g * count * 4, count, cap, floats_at(v_side[SCALE], kv_heads)[h])
        results = floats_at(sums, group * dim)
        for d in range(group * dim):
            results[d] = 0
        over_tokens(False, sums, group, dim, cells, v_side, h, scores, row)
        write_row(results, out + h * group * dim * (2 if out_half else 4), out_half, group * dim)


def decode_attention(
    qk, qk_half, qk_stride, v, v_half, v_stride, cos, sin, angle_stride, turning, out, out_half,
    slots, tables, table_stride, lens, tokens, numbers, scale, cap,
):  # fmt: skip
    """One token of each of `tokens` sequences: see `decode.FusedDecode`. Every tensor is an address, strides are in
    elements; `half` says bfloat16, else it is float32. The first `turning` columns of cos and sin are used."""
    n = longs_at(numbers, 8)
    heads, kv_heads, dim, block_size, window, storage, block_bytes = n[0], n[1], n[2], n[3], n[4], n[5], n[6]
    k_side, v_side = longs_at(numbers + 64, 8), longs_at(numbers + 128, 8)
    slot_of, len_of = longs_at(slots, tokens), ints_at(lens, tokens)
    longest = 0
    for t in range(tokens):
        longest = max(longest, len_of[t])
    group = heads // kv_heads
    scratch = np.empty((2 * group + block_size) * dim + group * longest, np.float32)
    row, shape = scratch.ctypes.data, (heads, kv_heads, dim)
    for t in range(tokens):
        angles = (cos + t * angle_stride * 4, sin + t * angle_stride * 4, turning)
        x, y = qk + t * qk_stride * (2 if qk_half else 4), v + t * v_stride * (2 if v_half else 4)
        place = storage + slot_of[t] // block_size * block_bytes
        store_token(x, qk_half, y, v_half, shape, angles, place, slot_of[t] % block_size, k_side, v_side, row)
        length = np.int64(len_of[t])
        first = max(0, length - window) if window else 0
        table = ints_at(tables + t * table_stride * 4, table_stride)
        cells = (table, block_size, first, length, storage, block_bytes)
        to = out + t * heads * dim * (2 if out_half else 4)
        attend_token(x, qk_half, shape, angles, cells, k_side, v_side, scale, cap, to, out_half, row)
    scratch[0] = 0  # it is addressed above: it must live until here
