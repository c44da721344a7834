"""Activations to 8-bit codes on their way into an 8-bit GEMM: a scale by row, by row and block, or a given one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["quantize_rows"]


def quantize_rows(
    x: torch.Tensor,
    encode: Any,
    largest: float,
    *,
    block: int | None = None,
    scale: torch.Tensor | None = None,
    native: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] of any float dtype -> codes uint8 [M, K] and scales float32 [M, G]; value = code * scale.

    Dynamic: a scale is the largest magnitude of its row (or of its `block` columns of the row; G = ceil(K / block))
    over `largest`, and 1 where everything is zero. Static: `scale` float32 [1] is used for all, G is 1; what exceeds
    it saturates. `encode(x, NATIVE)` is a Triton device function: float32 block -> uint8 codes, saturating.
    """
    from qengine_kernels.quantize_rows.kernel import launch_quantize_rows

    return launch_quantize_rows(x, encode, largest, block, scale, native)
