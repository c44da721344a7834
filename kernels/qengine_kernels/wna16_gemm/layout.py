"""The packed layout that the weight-only kernels read, whatever the checkpoint's own layout was.

Codes of `8` consecutive slices of P rows share words: the K rows of a weight are cut into tiles of 8 * P rows, and
word row p of a tile holds, in its nibble s (bits 4s .. 4s + 3), row s * P + p of that tile:

    nibble          0        1      ...      7
    rows of x    0..P-1   P..2P-1   ...  7P..8P-1      (word row p of the tile: the p-th row of each slice)

So a kernel loads a block of words once, and nibble after nibble yields a slice of the weight that belongs to P
neighbouring columns of x: no shuffles between threads. P is 16 where K allows, the least that tensor cores take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine_kernels.launch import ceil_div

NIBBLES = 8


@dataclass(frozen=True)
class PackedWeight:
    """A 4-bit weight [K, N] on its device; value = (code - zero) * scale, by group of K rows.

    words       int32 [ceil(K / 8), N], see above
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

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    @property
    def slice_rows(self) -> int:
        return slice_rows(self.in_features)


def slice_rows(in_features: int) -> int:
    """P for a weight of K rows: the largest of 16, 8, 4, 2, 1 whose tiles of 8 * P rows fill K exactly (1 where K is
    no multiple of 8: up to 7 rows of padding)."""
    return next((p for p in (16, 8, 4, 2) if in_features % (NIBBLES * p) == 0), 1)


def packed_bytes(in_features: int, out_features: int, group_size: int, zeros: bool, scale_bytes: int = 2) -> int:
    """Bytes of a `PackedWeight`; group_size as `normal_group_size` gives it."""
    groups = ceil_div(in_features, group_size)
    return out_features * (4 * ceil_div(in_features, NIBBLES) + groups * (scale_bytes + int(zeros)))


def normal_group_size(group_size: int, in_features: int) -> int:
    """-1 (or anything larger than K) means one group of K rows. Raises ValueError for 0 and other negatives."""
    if group_size == -1:
        return in_features
    if group_size < 1:
        raise ValueError(f"group_size {group_size} makes no sense; use -1 for one group, or a positive number")
    return min(group_size, in_features)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """codes uint8 [K, N], 0..15 -> words int32 [ceil(K / 8), N] in the layout above; rows past K hold code 0."""
    k, n = codes.shape
    p = slice_rows(k)
    padding = -k % NIBBLES
    if padding:
        codes = torch.cat([codes, codes.new_zeros(padding, n)])
    tiles = codes.view(-1, NIBBLES, p, n)
    words = torch.zeros(tiles.shape[0], p, n, dtype=torch.int32, device=codes.device)
    for s in range(NIBBLES):
        words |= tiles[:, s].to(torch.int32) << (4 * s)
    return words.view(-1, n)


def unpack_words(words: torch.Tensor, in_features: int) -> torch.Tensor:
    """Inverse of `pack_codes`: words int32 [ceil(K / 8), N] -> uint8 [K, N]."""
    n = words.shape[1]
    p = slice_rows(in_features)
    tiles = words.view(-1, p, n)
    slices = [((tiles >> (4 * s)) & 0xF).to(torch.uint8) for s in range(NIBBLES)]
    return torch.stack(slices, dim=1).reshape(-1, n)[:in_features]
