"""The meaning of an 8-bit by 8-bit linear in plain torch."""

from __future__ import annotations

import torch

from qengine_kernels.w8a16_gemm.layout import ByteWeight
from qengine_kernels.w8a16_gemm.reference import dequantize_reference


def w8a8_reference(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: ByteWeight,
    values: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [M, N]; `values` [256] holds the value of each code."""
    width = weight.block_k if scales.shape[1] > 1 else codes.shape[1]
    factor = scales.repeat_interleave(width, dim=1)[:, : codes.shape[1]]
    x = values.float().to(codes.device)[codes.long()] * factor
    y = x @ dequantize_reference(weight, values).t()
    return y if bias is None else y + bias.float()
