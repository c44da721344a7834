"""The storage of a layer seen as a table of equal rows, so that reads and writes are one gather or scatter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowMap:
    """Where a token's K, its V, or both lie when the storage is viewed as rows of `width` elements.

    Rows of block b start at `b * per_block`; what belongs to token t begins at row `f + t * per_token` for each f of
    `firsts` (one for each side that the map serves), and consists of the rows at `pieces` (relative), heads one after
    the other. With tokens that are contiguous over their heads (the usual layout) there is one piece.
    """

    width: int
    per_block: int
    per_token: int
    firsts: tuple[int, ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, side: Any, offsets: tuple[int, ...], num_kv_heads: int, block_bytes: int) -> RowMap:
        """`side` has the fields of `qengine.plugin.SideLayout`; `offsets` are the bytes where the sides that it
        describes begin in a block. `block_bytes` is the storage's own row length: it may exceed the layout's when
        layers share storage."""
        size = side.dtype.itemsize
        elements, starts = block_bytes // size, [offset // size for offset in offsets]
        steps = (*starts, side.token_stride, elements)
        token = num_kv_heads * side.row
        if side.head_stride == side.row and not any(s % token for s in steps):
            width, pieces = token, [0]
        else:
            width = math.gcd(side.row, side.head_stride, *steps)
            heads = [h * side.head_stride for h in range(num_kv_heads)]
            pieces = [h + i for h in heads for i in range(0, side.row, width)]
        return cls(
            width=width,
            per_block=elements // width,
            per_token=side.token_stride // width,
            firsts=tuple(s // width for s in starts),
            pieces=tuple(p // width for p in pieces),
        )

    def view(self, storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 storage [num_blocks, block_bytes] -> [rows, width] of the layout's dtype, sharing memory."""
        return storage.view(dtype).view(-1, self.width)

    def rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """int64 blocks and offsets inside them, of equal shape [...] -> flat row indices of [firsts, ..., pieces]."""
        base = blocks * self.per_block + offsets * self.per_token
        out = torch.stack([base + first for first in self.firsts])
        if len(self.pieces) > 1:
            out = out.unsqueeze(-1) + torch.tensor(self.pieces)
        return out.flatten()


Maps = tuple[RowMap, ...]
"""The maps of one layer: one for K and V where both are stored alike, else one for each."""


def rows_of(maps: Maps, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`RowMap.rows` of each map."""
    return tuple(m.rows(blocks, offsets) for m in maps)
