"""An 8-bit weight as the kernels read it: the checkpoint's own bytes, and scales by output row and block of inputs.

Rows of the weight name their row of scales, so that one table serves per-channel scales, several fused modules with a
scale each, and blocks of outputs whose last one is short in the middle of a fused weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine_kernels.launch import ceil_div

LEAST_BLOCK = 32
"""Columns of x that share a scale come in multiples of this: the least that the matrix units take of 8-bit values."""


@dataclass(frozen=True)
class ByteWeight:
    """W[n, k] = value(codes[n, k]) * scales[rows[n], k // block_k], on its device.

    codes    uint8 [N, K]
    scales   float32 [R, ceil(K / block_k)]
    rows     int32 [N], or None where R == N and every row has its own
    block_k  inputs that share a scale; K where all do
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor | None
    block_k: int

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        columns = ceil_div(k, self.block_k)
        if self.scales.dim() != 2 or self.scales.shape[1] != columns or (self.rows is None and len(self.scales) != n):
            have, need = tuple(self.scales.shape), (n if self.rows is None else "any", columns)
            raise ValueError(f"scales have shape {have}; need {need} for a weight [{n}, {k}], blocks of {self.block_k}")
        if columns > 1 and self.block_k % LEAST_BLOCK:
            raise ValueError(f"blocks of {self.block_k} inputs are not supported; need: a multiple of {LEAST_BLOCK}")

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def blocked(self) -> bool:
        """Whether scales change along the inputs."""
        return self.scales.shape[1] > 1

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {"codes": self.codes, "scales": self.scales}
        return named if self.rows is None else named | {"rows": self.rows}


def byte_weight_bytes(out_features: int, in_features: int, block: tuple[int, int] | None) -> int:
    """Bytes of a `ByteWeight`: `block` is (outputs, inputs) that share a scale, None for a scale a row. Fused modules
    with short blocks between them have a few scales more."""
    codes = out_features * in_features
    if block is None:
        return codes + 4 * out_features
    return codes + 4 * ceil_div(out_features, block[0]) * ceil_div(in_features, block[1]) + 4 * out_features


def row_scales(parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """(outputs, scale) of each stacked module -> float32 [N, 1]. A scale is one number, or one for each output."""
    return torch.cat([s.to(torch.float32).reshape(-1, 1).expand(n, 1) for n, s in parts])


def block_scales(parts: Sequence[tuple[int, torch.Tensor]], block_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, grid [ceil(outputs / block_n), C]) of each stacked module -> scales float32 [R, C], rows int32 [N].

    A module's blocks start anew at its first row, wherever that lies in the stack.
    """
    scales, rows, first = [], [], 0
    for n, grid in parts:
        scales.append(grid.to(torch.float32))
        rows.append(torch.arange(n, dtype=torch.int32) // block_n + first)
        first += len(grid)
    return torch.cat(scales), torch.cat(rows)
