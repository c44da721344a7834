"""K, or V, of one layer's paged storage, as the kernels take it.

Objects that come from outside are duck-typed: a side layout has the fields of `qengine.plugin.SideLayout`, functions
those of `qengine.plugin.KVFunctions` or `KVRowFunctions`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch


def side_view(storage: torch.Tensor, side: Any, offset: int) -> torch.Tensor:
    """uint8 storage [num_blocks, bytes] -> [num_blocks, elements] of the side's dtype from byte `offset` of each block
    on, sharing memory."""
    return storage.view(side.dtype)[:, offset // side.dtype.itemsize :]


@dataclass(frozen=True)
class CacheSide:
    """`cache` is `side_view` of the storage; `layout` says where the row of a token and head starts in a block.

    scale    float32 [num_kv_heads], multiply-to-dequantise; `inverse` its reciprocal
    write    device function encode(x, NATIVE), or with `rows` store(x, p_rows, row_mask, HEAD_DIM, NATIVE)
    read     device function decode(b, NATIVE), or with `rows` load(p_rows, o_dim, row_mask, HEAD_DIM, NATIVE)
    pairs    device function pairs(w, MODE) over 16-bit elements of two stored values each, or None
    """

    cache: torch.Tensor
    layout: Any
    scale: torch.Tensor
    inverse: torch.Tensor
    write: Any
    read: Any
    rows: bool
    pairs: Any = None

    @classmethod
    def of(cls, storage: torch.Tensor, layout: Any, which: str, scale: torch.Tensor, functions: Any) -> CacheSide:
        """`which` is "k" or "v"; `layout` has the fields of `qengine.plugin.KVLayout`."""
        side, offset = getattr(layout, which), getattr(layout, f"{which}_offset")
        scale = scale.to(storage.device, torch.float32).contiguous()
        rows = hasattr(functions, "load")
        write, read = (functions.store, functions.load) if rows else (functions.encode, functions.decode)
        pairs = getattr(functions, "pairs", None)
        return cls(side_view(storage, side, offset), side, scale, scale.reciprocal(), write, read, rows, pairs)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of a block, a token and a head, in elements."""
        return self.cache.stride(0), self.layout.token_stride, self.layout.head_stride

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 16, that divides all strides."""
        return math.gcd(16, *self.strides)

    def check(self, head_dim: int) -> None:
        """Raises ValueError when elementwise functions are given for rows that are not one element a value."""
        if not self.rows and self.layout.row != head_dim:
            raise ValueError(
                f"encode and decode work on one element a value; have row {self.layout.row}, head_dim {head_dim}: "
                "such a format brings store and load"
            )

    def paired(self) -> CacheSide | None:
        """The same bytes as 16-bit elements of two values each, read by `pairs`; None where the format has no such
        function, or rows or blocks do not begin at even bytes."""
        even = all(stride % 2 == 0 for stride in (*self.strides, self.cache.storage_offset(), self.layout.row))
        if self.pairs is None or self.cache.dtype.itemsize != 1 or not even:
            return None
        width = self.cache.shape[1] // 2 * 2
        layout = PairLayout(self.layout.token_stride // 2, self.layout.head_stride // 2, self.layout.row // 2)
        return replace(self, cache=self.cache[:, :width].view(torch.int16), layout=layout, read=self.pairs)


@dataclass(frozen=True)
class PairLayout:
    """The strides and the length of a row, in 16-bit elements."""

    token_stride: int
    head_stride: int
    row: int
