"""The bits of pack-quantized tensors: values packed into 32-bit words along one axis, the lowest bits first.

A stored value is `signed + 2 ** (bits - 1)`, so it is never negative. Two layouts exist; with 2, 4 and 8 bits they are
the same:

dense   compressed-tensors from 0.17 on: value i starts at bit i * bits of the row, across word borders
padded  before: floor(32 / bits) values a word, the highest bits of each word unused

(FORMAT: compressed-tensors 0.12.2 quantized_compressors/pack_quantized.py, 0.19.0 pack_quantized/helpers.py.)
"""

from __future__ import annotations

from typing import Literal

import torch

Packing = Literal["dense", "padded"]


def words_of(count: int, bits: int, packing: Packing) -> int:
    """Words that hold `count` values."""
    return -(-count * bits // 32) if packing == "dense" else -(-count // (32 // bits))


def packing_of(words: int, count: int, bits: int, likely: Packing = "dense") -> Packing | None:
    """The layout in which `count` values take `words` words; `likely` where both do, None where neither does."""
    fitting: list[Packing] = [p for p in ("dense", "padded") if words_of(count, bits, p) == words]
    return likely if likely in fitting else next(iter(fitting), None)


def unpack(words: torch.Tensor, bits: int, count: int, packing: Packing) -> torch.Tensor:
    """int32 [R, W] -> the stored values, uint8 [R, count]."""
    if packing == "padded" or 32 % bits == 0:
        return _unpack_slots(words, bits)[:, :count]
    extra = -words.shape[1] % bits
    if extra:
        words = torch.nn.functional.pad(words, (0, extra))
    runs = words.unflatten(1, (-1, bits))  # 32 values in `bits` words
    out = torch.empty(*runs.shape[:2], 32, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        value = runs[:, :, word] >> shift
        low = 32 - shift
        if low < bits:  # the rest is in the next word; the shift has filled in the sign above `low` bits
            value = (value & ((1 << low) - 1)) | (runs[:, :, word + 1] << low)
        out[:, :, i] = value & mask
    return out.flatten(1)[:, :count]


def _unpack_slots(words: torch.Tensor, bits: int) -> torch.Tensor:
    slots, mask = 32 // bits, (1 << bits) - 1
    out = torch.empty(*words.shape, slots, dtype=torch.uint8, device=words.device)
    for i in range(slots):
        out[:, :, i] = (words >> (i * bits)) & mask
    return out.flatten(1)
