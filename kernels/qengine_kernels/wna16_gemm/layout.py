"""The packed layout that the weight-only kernels read, whatever the checkpoint's own layout was.

A word has S = 32 / bits slots for codes of 2, 4 or 8 bits. Codes of S consecutive slices of P rows share words: the K
rows of a weight are cut into tiles of S * P rows, and word row p of a tile holds, in its slot s (4 bits: nibble s, bits
4s .. 4s + 3), row s * P + p of that tile. With 4 bits:

    slot            0        1      ...      7
    rows of x    0..P-1   P..2P-1   ...  7P..8P-1      (word row p of the tile: the p-th row of each slice)

So a kernel loads a block of words once, and slot after slot yields a slice of the weight that belongs to P
neighbouring columns of x: no shuffles between threads. P is 16 where K allows, the least that tensor cores take.
3-bit codes have no layout of their own: they are held in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine_kernels.launch import ceil_div

BITS = (2, 4, 8)


def slots_of(bits: int) -> int:
    """Codes in a word."""
    if bits not in BITS:
        raise ValueError(f"{bits} bits are not held in words here; need: one of {BITS}")
    return 32 // bits


@dataclass(frozen=True)
class PackedWeight:
    """A weight [K, N] of 2, 4 or 8 bits on its device; value = (code - zero) * scale, by group of K rows.

    words       int32 [ceil(K / slots), N], see above
    scales      float16, bfloat16 or float32 [G, N]
    zeros       uint8 [G, N], or None: `symmetric_zero` everywhere
    group_size  K rows that share a scale row; the last group may be shorter; G = ceil(K / group_size)
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    in_features: int
    group_size: int
    symmetric_zero: int = 8
    bits: int = 4

    @property
    def slots(self) -> int:
        return slots_of(self.bits)

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    @property
    def slice_rows(self) -> int:
        return slice_rows(self.in_features, self.bits)

    def buffers(self) -> dict[str, torch.Tensor]:
        """What is kept on the device, by name."""
        named = {"words": self.words, "scales": self.scales, "zeros": self.zeros}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def slice_rows(in_features: int, bits: int = 4) -> int:
    """P for a weight of K rows: the largest of 16, 8, 4, 2, 1 whose tiles of S * P rows fill K exactly (1 where K is
    no multiple of S: up to S - 1 rows of padding)."""
    slots = slots_of(bits)
    return next((p for p in (16, 8, 4, 2) if in_features % (slots * p) == 0), 1)


def packed_bytes(
    in_features: int, out_features: int, group_size: int, zeros: bool, scale_bytes: int = 2, bits: int = 4
) -> int:
    """Bytes of a `PackedWeight`; group_size as `normal_group_size` gives it."""
    groups = ceil_div(in_features, group_size)
    return out_features * (4 * ceil_div(in_features, slots_of(bits)) + groups * (scale_bytes + int(zeros)))


def normal_group_size(group_size: int, in_features: int) -> int:
    """-1 (or anything larger than K) means one group of K rows. Raises ValueError for 0 and other negatives."""
    if group_size == -1:
        return in_features
    if group_size < 1:
        raise ValueError(f"group_size {group_size} makes no sense; use -1 for one group, or a positive number")
    return min(group_size, in_features)


def pack_codes(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """codes uint8 [K, N], each below 2**bits -> words int32 [ceil(K / S), N] in the layout above; rows past K hold
    code 0."""
    k, n = codes.shape
    p, slots = slice_rows(k, bits), slots_of(bits)
    padding = -k % slots
    if padding:
        codes = torch.cat([codes, codes.new_zeros(padding, n)])
    tiles = codes.view(-1, slots, p, n)
    words = torch.zeros(tiles.shape[0], p, n, dtype=torch.int32, device=codes.device)
    for s in range(slots):
        words |= tiles[:, s].to(torch.int32) << (bits * s)
    return words.view(-1, n)


def unpack_words(words: torch.Tensor, in_features: int, bits: int = 4) -> torch.Tensor:
    """Inverse of `pack_codes`: words int32 [ceil(K / S), N] -> uint8 [K, N]."""
    n = words.shape[1]
    tiles = words.view(-1, slice_rows(in_features, bits), n)
    slices = [((tiles >> (bits * s)) & (2**bits - 1)).to(torch.uint8) for s in range(slots_of(bits))]
    return torch.stack(slices, dim=1).reshape(-1, n)[:in_features]
