"""The meaning of an 8-bit linear in plain torch."""

from __future__ import annotations

import torch

from qengine_kernels.w8a16_gemm.layout import ByteWeight


def expand_scales(weight: ByteWeight) -> torch.Tensor:
    """float32 [N, K]: the scale of each element."""
    scales = weight.scales if weight.rows is None else weight.scales[weight.rows.long()]
    return scales.repeat_interleave(weight.block_k, dim=1)[:, : weight.in_features]


def dequantize_reference(weight: ByteWeight, values: torch.Tensor) -> torch.Tensor:
    """float32 [N, K]; `values` [256] holds the value of each code."""
    return values.float().to(weight.codes.device)[weight.codes.long()] * expand_scales(weight)


def w8a16_reference(
    x: torch.Tensor, weight: ByteWeight, values: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [M, N]."""
    y = x.float() @ dequantize_reference(weight, values).t()
    return y if bias is None else y + bias.float()
