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

PLAIN = tl.constexpr(0)
PACKED = tl.constexpr(1)
HARDWARE = tl.constexpr(2)
"""How `*_pairs` work: plain operations (Triton's interpreter), integer operations on two codes in one register (any
GPU), or conversion instructions (sm_89 and up)."""


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


@triton.jit
def _asm_pairs(w, ASM: tl.constexpr):
    """One asm block for two 16-bit elements in a register -> two float16 in a register."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2)


def _e4m3_by_hardware(select: int) -> tl.constexpr:
    """The bytes that `select` picks from two 16-bit elements, as two float16."""
    return tl.constexpr(
        "{ .reg .b32 t; .reg .b16 a, b; "
        f"prmt.b32 t, $1, 0, {select:#x}; mov.b32 {{a, b}}, t; cvt.rn.f16x2.e4m3x2 $0, a; }}"
    )


def _e4m3_by_integers(shift: int) -> tl.constexpr:
    """The low bytes of two 16-bit elements that were shifted right by `shift`. The 7 bits below a sign are a float16
    with its exponent 8 too small; adding 1 to them carries into bit 7 for NaN alone, where that completes the
    exponent."""
    return tl.constexpr(
        "{ .reg .b32 w, t, u, c; "
        f"shr.b32 w, $1, {shift}; and.b32 t, w, 0x007f007f; add.u32 u, t, 0x00010001; "
        "lop3.b32 t, u, 0x00800080, t, 0xEA; shl.b32 t, t, 7; shl.b32 w, w, 8; lop3.b32 t, w, 0x80008000, t, 0xEA; "
        "mov.b32 c, 0x5c005c00; mul.f16x2 $0, t, c; }"
    )


E4M3_HARDWARE_LOW, E4M3_HARDWARE_HIGH = _e4m3_by_hardware(0x4420), _e4m3_by_hardware(0x4431)
E4M3_INTEGER_LOW, E4M3_INTEGER_HIGH = _e4m3_by_integers(0), _e4m3_by_integers(8)
E5M2_LOW = tl.constexpr("{ .reg .b32 t; shl.b32 t, $1, 8; and.b32 $0, t, 0xff00ff00; }")
E5M2_HIGH = tl.constexpr("and.b32 $0, $1, 0xff00ff00;")


@triton.jit
def e4m3_pairs(w, MODE: tl.constexpr):
    """16-bit elements of two e4m3 codes each -> the values of the low bytes and of the high ones, float16, exact."""
    if MODE == HARDWARE:
        return _asm_pairs(w, E4M3_HARDWARE_LOW), _asm_pairs(w, E4M3_HARDWARE_HIGH)
    elif MODE == PACKED:
        return _asm_pairs(w, E4M3_INTEGER_LOW), _asm_pairs(w, E4M3_INTEGER_HIGH)
    else:
        return e4m3_decode((w & 0xFF).to(tl.uint8), False), e4m3_decode(((w >> 8) & 0xFF).to(tl.uint8), False)


@triton.jit
def e5m2_pairs(w, MODE: tl.constexpr):
    """As `e4m3_pairs`, for e5m2."""
    if MODE == PLAIN:
        return e5m2_decode((w & 0xFF).to(tl.uint8), False), e5m2_decode(((w >> 8) & 0xFF).to(tl.uint8), False)
    else:
        return _asm_pairs(w, E5M2_LOW), _asm_pairs(w, E5M2_HIGH)
