"""Linear layers over 8-bit weights kept as they are stored: y = x @ (value(code) * scale).T + bias."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip
from qengine_kernels.w8a16_gemm.config import Route
from qengine_kernels.w8a16_gemm.layout import ByteWeight, block_scales, byte_weight_bytes, row_scales

__all__ = ["ByteWeight", "block_scales", "byte_weight_bytes", "row_scales", "w8a16_matmul"]


def w8a16_matmul(
    x: torch.Tensor,
    weight: ByteWeight,
    bias: torch.Tensor | None,
    decode: Any,
    chip: Chip | None = None,
    route: Route | None = None,
) -> torch.Tensor:
    """x [M, K] float16, bfloat16 (sm_80 up) or float32, bias [N] or None -> [M, N] in x's dtype, float32 accumulation.

    `decode(codes, NATIVE)` is a Triton device function: uint8 codes -> their exact values as a float16 block (NATIVE:
    sm_89 conversions may be used). A few rows run as multiply-and-add with K split over programs, some hundreds through
    `tl.dot`, more by dequantising a bounded part of the weight at a time for a library GEMM; on sm_75, where `tl.dot`
    is plain FMA, the middle is left out. `chip` and `route` ("gemv", "gemm", "dequantize") override the choice, for
    tests.
    """
    from qengine_kernels.w8a16_gemm.launcher import launch_w8a16

    return launch_w8a16(x, weight, bias, decode, chip, route)
