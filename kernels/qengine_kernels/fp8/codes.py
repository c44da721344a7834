"""8-bit floats in plain torch: saturating encode and exact decode, for all 256 codes.

e4m3 ("fn"): 1 sign, 4 exponent (bias 7) and 3 fraction bits, no infinity, NaN 0x7f and 0xff, largest 448.
e5m2: 1 sign, 5 exponent (bias 15) and 2 fraction bits, infinity 0x7c, largest finite 57344; the upper byte of a
float16. Format: OCP 8-bit floating point specification, rev. 1.0.
"""

from __future__ import annotations

import functools
import math

import torch

PAIR = {torch.float32: torch.float64, torch.float16: torch.int32, torch.bfloat16: torch.int32}
"""A dtype whose element holds two elements of the key."""


def encode(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """Float values -> uint8 codes of the torch dtype `fp8`, to nearest even, saturating; NaN becomes 0x7f.

    torch's own cast rounds rightly but saturates only in some versions and formats; elsewhere it gives NaN or infinity
    above the largest value. Clamping first is exact, because the largest value is representable. float32 holds every
    float16 and bfloat16 value, so the input's dtype does not matter.
    """
    largest = torch.finfo(fp8).max
    finite = x.to(torch.float32).nan_to_num(nan=math.nan).clamp(-largest, largest)
    return finite.to(fp8).view(torch.uint8)


@functools.cache
def pair_table(fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """[65536] elements of PAIR[dtype]: the two `dtype` values of every pair of codes, low byte first.

    512 KiB for float32, of which real K and V touch a small part (few exponents are common).
    """
    codes = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    values = codes.view(fp8).to(torch.float32).to(dtype)
    return values.view(PAIR[dtype])


def decode(b: torch.Tensor, fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """uint8 codes [..., n] -> their exact values as `dtype`, NaN and infinity included.

    On a CPU two codes at a time are looked up in a table: for 38k codes 18 us on one AVX-512 core, where torch's cast
    takes 150 and integer arithmetic, which would still lack NaN, 15.
    """
    shape = b.shape
    if not b.is_cpu or dtype not in PAIR or shape[-1] % 2:
        return b.view(fp8).to(torch.float32).to(dtype)
    index = b.contiguous().view(torch.uint16).int().view(-1)
    return pair_table(fp8, dtype).index_select(0, index).view(dtype).view(shape)
