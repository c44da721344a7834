"""How an 8-bit KV format that codes each value on its own encodes and decodes, as tables made by its own functions."""

from __future__ import annotations

from collections.abc import Callable

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def value_table(decode: Function, row: int) -> torch.Tensor:
    """float32 [256]: what each code means. `decode` takes uint8 [n, row]."""
    codes = torch.arange(-(-256 // row) * row).remainder(256).to(torch.uint8)
    return decode(codes.view(-1, row)).float().flatten()[:256].contiguous()


def code_table(encode: Function, row: int) -> torch.Tensor:
    """int32 [65536] (bits of uint32), indexed by the upper half of a float32's bits. `encode` takes float32 [n, row].

    The code of a value is byte 0 of its entry if the lower half of its bits is less than the entry's upper half, else
    byte 1. So values with the same upper half, which differ by less than a part in 128, may have two codes, and where
    they change is found by bisection: rounding is the format's own, ties, NaN and infinities included. Enough for
    formats of 8 bits, whose neighbours lie further apart.
    """
    upper = torch.arange(65536, dtype=torch.int64) << 16

    def code(lower: torch.Tensor) -> torch.Tensor:
        return _encoded(encode, upper + lower, row)

    low, high = torch.zeros_like(upper), torch.full_like(upper, 65535)
    below, above = code(low), code(high)
    for _ in range(16):
        middle = (low + high) // 2
        same = code(middle) == below
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    entry = below | above << 8 | torch.where(below == above, 0, high) << 16
    return _as_int32(entry)


def _encoded(encode: Function, bits: torch.Tensor, row: int) -> torch.Tensor:
    """Codes of the float32 values with these bits, int64 in shape [n]."""
    values = torch.nn.functional.pad(_as_int32(bits), (0, -len(bits) % row)).view(torch.float32)
    return encode(values.view(-1, row)).contiguous().view(torch.uint8).flatten()[: len(bits)].long()


def _as_int32(bits: torch.Tensor) -> torch.Tensor:
    """int64 0..2^32-1 -> int32 of the same bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


def look_up(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 x by a `code_table`, in plain torch: what the kernel does."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    entry = table.long()[bits >> 16] & 0xFFFFFFFF
    return torch.where((bits & 0xFFFF) >= (entry >> 16), entry >> 8 & 0xFF, entry & 0xFF).to(torch.uint8)
