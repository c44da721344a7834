"""The storage of a layer seen as a table of equal rows, so that reads and writes are one gather or scatter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowMap:
    """Where a token's K and V lie when the storage is viewed as rows of `width` elements.

    Rows of block b start at `b * per_block`; token t's K begins at row `k_first + t * per_token`, its V at
    `v_first + ...`, and consists of the rows at `pieces` (relative), heads one after the other. With tokens that are
    contiguous over their heads (the usual layout) there is one piece.
    """

    width: int
    per_block: int
    per_token: int
    k_first: int
    v_first: int
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, layout: Any, num_kv_heads: int, block_bytes: int) -> RowMap:
        """`block_bytes` is the storage's own row length: it may exceed the layout's when layers share storage."""
        elements = block_bytes // layout.dtype.itemsize
        steps = (layout.k_offset, layout.v_offset, layout.token_stride, elements)
        token = num_kv_heads * layout.row
        if layout.head_stride == layout.row and not any(s % token for s in steps):
            width, starts = token, [0]
        else:
            width = math.gcd(layout.row, layout.head_stride, *steps)
            heads = [h * layout.head_stride for h in range(num_kv_heads)]
            starts = [h + i for h in heads for i in range(0, layout.row, width)]
        return cls(
            width=width,
            per_block=elements // width,
            per_token=layout.token_stride // width,
            k_first=layout.k_offset // width,
            v_first=layout.v_offset // width,
            pieces=tuple(s // width for s in starts),
        )

    def view(self, storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 storage [num_blocks, block_bytes] -> [rows, width] of the layout's dtype, sharing memory."""
        return storage.view(dtype).view(-1, self.width)

    def rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """int64 blocks and offsets inside them, of equal shape [...] -> flat row indices of [2 (K, V), ..., pieces]."""
        base = blocks * self.per_block + offsets * self.per_token
        both = torch.stack([base + self.k_first, base + self.v_first])
        if len(self.pieces) > 1:
            both = both.unsqueeze(-1) + torch.tensor(self.pieces)
        return both.flatten()
