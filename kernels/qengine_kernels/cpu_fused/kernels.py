"""The kernels of norms and activations. Every tensor is an address; `half` says bfloat16, else it is float32.

Imports numba (see `scalar`). Compiled for the signatures in `loading`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from qengine_kernels.cpu_fused.scalar import REORDER, floats_at, gelu, gelu_tanh, read_row, silu, write_row


@njit(fastmath=REORDER, error_model="numpy")
def inverse_rms(row, count, eps):
    total = np.float32(0.0)
    for i in range(count):
        total += row[i] * row[i]
    return np.float32(1.0) / np.sqrt(total / np.float32(count) + eps)


def rms_norm(x, x_half, stride, residual, weight, eps, out, out_half, tokens, groups, size):
    """out [tokens, groups, size] = x / rms(x) * weight [groups, size]; x's tokens are `stride` elements apart. With a
    residual (float32 [tokens, size], groups 1; address 0: none) x is added to it first, and the sum is normalised."""
    row = np.empty(size, np.float32)
    x_bytes, out_bytes = (2 if x_half else 4), (2 if out_half else 4)
    scales = floats_at(weight, groups * size)
    for t in range(tokens):
        for g in range(groups):
            read_row(x + (t * stride + g * size) * x_bytes, x_half, row, size)
            if residual:
                total = floats_at(residual + t * size * 4, size)
                for i in range(size):
                    total[i] += row[i]
                    row[i] = total[i]
            factor = inverse_rms(row, size, eps)
            for i in range(size):
                row[i] = row[i] * scales[g * size + i] * factor
            write_row(row, out + (t * groups + g) * size * out_bytes, out_half, size)


def gated(x, half, out, rows, size, kind):
    """out [rows, size] = act(x[:, :size]) * x[:, size:], of one dtype. kind: 0 silu, 1 gelu, 2 its tanh form."""
    gate, up = np.empty(size, np.float32), np.empty(size, np.float32)
    step = size * (2 if half else 4)
    for r in range(rows):
        read_row(x + 2 * r * step, half, gate, size)
        read_row(x + (2 * r + 1) * step, half, up, size)
        if kind == 0:
            for i in range(size):
                gate[i] = silu(gate[i]) * up[i]
        elif kind == 1:
            for i in range(size):
                gate[i] = gelu(gate[i]) * up[i]
        else:
            for i in range(size):
                gate[i] = gelu_tanh(gate[i]) * up[i]
        write_row(gate, out + r * step, half, size)
