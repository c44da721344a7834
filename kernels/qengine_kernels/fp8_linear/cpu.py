"""e4m3 weights on a CPU, one byte each: tiles are decoded by a table for every call and multiplied densely.

Weight-only. Decoding bounds small batches (a table lookup takes longer than reading two bytes would), so this saves
memory, not time, against 16-bit weights. Row scales multiply the results; block scales multiply the decoded weights in
float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qengine_kernels.cpu_linear.dense import Way
from qengine_kernels.fp8.codes import decode
from qengine_kernels.fp8_linear.weight import E4M3
from qengine_kernels.w8a16_gemm.layout import ByteWeight

TILE = 1 << 20
"""Weights decoded at a time: large enough for the library, small enough for the second-level cache."""
FEW_ROWS = 16
"""Up to here blocks are multiplied in float32, which saves the tile's conversion to 16 bits."""


class Fp8CpuLinear:
    """y = x @ W.T + bias for x [M, K] and y [M, N] of `dtype`; `way` is this CPU's fastest bf16 GEMM (`tuning()`)."""

    def __init__(self, weight: ByteWeight, bias: torch.Tensor | None, dtype: torch.dtype, way: Way) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.dtype = dtype
        self.bias = None if bias is None else bias.to(dtype)
        self.work = torch.bfloat16 if dtype is torch.bfloat16 and way != "float32" else torch.float32
        name = str(self.work).removeprefix("torch.")
        self.kernel = f"weight-only FP8: decoded for each call, {name} GEMM"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        work = torch.float32 if self.weight.blocked and len(x) <= FEW_ROWS else self.work
        x = x.to(work)
        step = max(1, TILE // self.in_features)
        tiles = [F.linear(x, self._tile(slice(n, n + step), work)) for n in range(0, self.out_features, step)]
        y = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
        if not self.weight.blocked:
            y = y * self._row_scales()
        y = y.to(self.dtype)
        return y if self.bias is None else y + self.bias

    def _row_scales(self) -> torch.Tensor:
        """float32 [1, N]."""
        w = self.weight
        return (w.scales if w.rows is None else w.scales[w.rows]).t()

    def _tile(self, rows: slice, work: torch.dtype) -> torch.Tensor:
        """Rows of the weight, with block scales applied but not row scales."""
        w = self.weight
        codes = w.codes[rows]
        if not w.blocked:
            return decode(codes, E4M3, work)
        scale = (w.scales[rows] if w.rows is None else w.scales[w.rows[rows]])[:, :, None]
        tile = decode(codes, E4M3, torch.float32)
        whole = self.in_features // w.block_k * w.block_k
        tile[:, :whole].unflatten(1, (-1, w.block_k)).mul_(scale[:, : whole // w.block_k])
        if whole < self.in_features:
            tile[:, whole:].mul_(scale[:, -1])
        return tile.to(work)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.weight.buffers() | ({} if self.bias is None else {"bias": self.bias})
