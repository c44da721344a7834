"""The bits of AutoAWQ's gemm layout (FORMAT: AutoAWQ 0.2.9, modules/linear/gemm.py).

A word holds eight neighbouring output columns 8w..8w+7; its nibble s (bits 4s..4s+3) is column 8w + ORDER[s]. qweight
is int32 [K, N / 8] and qzeros int32 [G, N / 8]; stored zeros are the real ones, 0..15.
"""

from __future__ import annotations

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC_ZERO = 8
"""The zero of files that hold no qzeros."""


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] -> uint8 [R, N], columns in order."""
    out = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(ORDER):
        out[..., column] = (words >> (4 * nibble)) & 15
    return out.flatten(1)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [R, N] of 0..15 -> int32 [R, N / 8]."""
    columns = codes.unflatten(1, (-1, 8)).to(torch.int32)
    words = torch.zeros(columns.shape[:2], dtype=torch.int32, device=codes.device)
    for nibble, column in enumerate(ORDER):
        words |= columns[..., column] << (4 * nibble)
    return words
