"""8-bit activations times 8-bit weights: y = (a_code * a_scale) @ (w_code * w_scale).T + bias."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip
from qengine_kernels.w8a16_gemm.layout import ByteWeight

__all__ = ["w8a8_matmul"]


def w8a8_matmul(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: ByteWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    dot: Any,
    *,
    native: bool,
    chip: Chip | None = None,
) -> torch.Tensor:
    """codes uint8 [M, K] with scales float32 [M, 1] or [M, ceil(K / weight.block_k)] -> [M, N] of `dtype`.

    `dot(a, w, NATIVE)` is a Triton device function: uint8 codes [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N] -> the
    product of their values, float32. It sees at most 256 columns at a time, whose sums are added in float32.
    `native` goes to it: whether matrix units for 8-bit values may be used. `chip` overrides the device's, for tests.
    """
    from qengine_kernels.w8a8_gemm.launcher import launch_w8a8

    return launch_w8a8(codes, scales, weight, bias, dtype, dot, native, chip)
