"""Triton device functions of 8-bit floats: e4m3 ("fn", no infinity, largest 448) and e5m2 (largest 57344).

Bytes are uint8 everywhere. With NATIVE=False only integer and float32/float16 arithmetic is used, so the same 256
values come out on every GPU from sm_75 up (a `tl.float8*` type does not compile below sm_89) and in Triton's
interpreter (whose own fp8 casts are wrong). NATIVE=True uses the hardware's conversions, sm_89 and up.

Encoding rounds to nearest even and saturates; infinities become the largest finite value; NaN becomes code 0x7f.
Format: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), and the OCP 8-bit floating point specification.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _encode_bits(x, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 block -> int32 codes of a 1-bit-sign, MANTISSA-bit-fraction format with exponent bias BIAS."""
    DROP: tl.constexpr = 23 - MANTISSA
    HALF: tl.constexpr = (1 << (DROP - 1)) - 1
    REBIAS: tl.constexpr = (127 - BIAS) << MANTISSA
    # float32 bits of the smallest normal value, and of the number whose unit in the last place is the subnormal step.
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    STEP_BITS: tl.constexpr = (128 - BIAS + DROP) << 23
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, LARGEST)
    # Normal values: add just under half a unit plus the kept part's last bit (ties to even), then drop bits. A carry
    # out of the fraction raises the exponent, as it should.
    normal = ((size + HALF + ((size >> DROP) & 1)) >> DROP) - REBIAS
    # Subnormal values: adding the step number makes the float32 adder round to a multiple of the step.
    step = (size * 0 + STEP_BITS).to(tl.float32, bitcast=True)
    subnormal = (size.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) - STEP_BITS
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal) | sign
    return tl.where(is_nan, 0x7F, code)


@triton.jit
def e4m3_encode(x, NATIVE: tl.constexpr):
    """float32 block -> uint8 e4m3 codes."""
    if NATIVE:
        b_clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
        b_code = b_clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(x != x, 0x7F, b_code).to(tl.uint8)
    else:
        return _encode_bits(x, 0x43E00000, 3, 7).to(tl.uint8)


@triton.jit
def e5m2_encode(x, NATIVE: tl.constexpr):
    """float32 block -> uint8 e5m2 codes."""
    if NATIVE:
        b_clamped = tl.minimum(tl.maximum(x, -57344.0), 57344.0)
        b_code = b_clamped.to(tl.float8e5).to(tl.uint8, bitcast=True)
        return tl.where(x != x, 0x7F, b_code).to(tl.uint8)
    else:
        return _encode_bits(x, 0x47600000, 2, 15).to(tl.uint8)


@triton.jit
def e4m3_decode(b, NATIVE: tl.constexpr):
    """uint8 e4m3 codes -> float16 block, exact."""
    if NATIVE:
        return b.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        code = b.to(tl.int16)
        # The 7 bits below the sign are a float16 with its exponent 8 too small, subnormals included.
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def e4m3_decode_finite(b, NATIVE: tl.constexpr):
    """As `e4m3_decode` for codes that hold no NaN (weights are checked when they are loaded): nothing is asked of
    each element."""
    if NATIVE:
        return b.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        code = b.to(tl.int16)
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(tl.float16)


@triton.jit
def e5m2_decode(b, NATIVE: tl.constexpr):
    """uint8 e5m2 codes -> float16 block, exact: e5m2 is the upper byte of a float16."""
    if NATIVE:
        return b.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        return (b.to(tl.int16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_dot(a, w, NATIVE: tl.constexpr):
    """uint8 e4m3 codes [M, K] and [K, N] -> float32 [M, N], the sum over this K. NATIVE uses matrix units for 8-bit
    floats (sm_89 and up); else the values, which float16 holds, are multiplied."""
    if NATIVE:
        return tl.dot(a.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True))
    else:
        return tl.dot(e4m3_decode(a, False), e4m3_decode(w, False))
