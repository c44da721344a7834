"""What the kernels are made of: memory by address, bits of floats, and functions that LLVM can vectorise.

Imports numba, so only `loading` imports this, once somebody wants the kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, extending, njit, types

intrinsic: Any = extending.intrinsic
"""Any, because its functions are called without their first parameter."""
REORDER = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, which is what makes them fast; NaN and infinity keep their meaning."""


@intrinsic
def as_pointer(_context: Any, address: Any, element: Any) -> Any:
    """int64 address -> pointer to elements of a numpy type."""
    pointer = types.CPointer(element.instance_type)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(address, element), codegen


@intrinsic
def float_of(_context: Any, bits: Any) -> Any:
    """The float32 of uint32 bits."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of(_context: Any, value: Any) -> Any:
    """The bits of a float32 as uint32."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), codegen


@njit
def bytes_at(address, count):
    return carray(as_pointer(address, np.uint8), (count,))


@njit
def halves_at(address, count):
    return carray(as_pointer(address, np.uint16), (count,))


@njit
def words_at(address, count):
    return carray(as_pointer(address, np.uint32), (count,))


@njit
def ints_at(address, count):
    return carray(as_pointer(address, np.int32), (count,))


@njit
def longs_at(address, count):
    return carray(as_pointer(address, np.int64), (count,))


@njit
def floats_at(address, count):
    return carray(as_pointer(address, np.float32), (count,))


@njit
def bfloat16_bits(value):
    """float32 -> bfloat16 to nearest even; NaN stays one."""
    bits = bits_of(np.float32(value))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(np.uint32(0x7FC0) if nan else rounded)


@njit(error_model="numpy")
def exp(x):
    """e^x in float32 within 2 units of the last place; 0 below -87, infinity above 88.7, NaN for NaN.

    No reordering here: adding and taking off 1.5 * 2^23 rounds to an integer, which lies in the sum's low bits.
    Polynomial: Moshier, Cephes, expf.
    """
    y = np.float32(-87.0) if x < np.float32(-87.0) else x
    y = np.float32(89.0) if y > np.float32(89.0) else y
    shifted = y * np.float32(1.44269504088896341) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = y - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    value = p * r * r + r + np.float32(1.0)
    half = float_of((bits_of(shifted) + np.uint32(126)) << np.uint32(23))
    result = value * half * np.float32(2.0)
    return np.float32(0.0) if x < np.float32(-87.0) else result


@njit(error_model="numpy")
def tanh(x):
    return np.float32(1.0) - np.float32(2.0) / (exp(np.float32(2.0) * x) + np.float32(1.0))


@njit(error_model="numpy")
def silu(x):
    return x / (np.float32(1.0) + exp(-x))


@njit
def gelu(x):
    return np.float32(0.5) * x * (np.float32(1.0) + np.float32(math.erf(x * np.float32(0.7071067811865476))))


@njit
def gelu_tanh(x):
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + tanh(inner))


@njit
def read_row(address, half, out, count):
    """out[:count] = the elements at `address`: bfloat16 where `half`, else float32."""
    if half:
        source = halves_at(address, count)
        for i in range(count):
            out[i] = float_of(np.uint32(source[i]) << np.uint32(16))
    else:
        values = floats_at(address, count)
        for i in range(count):
            out[i] = values[i]


@njit
def write_row(row, address, half, count):
    """The elements at `address`, bfloat16 where `half` and else float32, = row[:count]."""
    if half:
        target = halves_at(address, count)
        for i in range(count):
            target[i] = bfloat16_bits(row[i])
    else:
        values = floats_at(address, count)
        for i in range(count):
            values[i] = row[i]
