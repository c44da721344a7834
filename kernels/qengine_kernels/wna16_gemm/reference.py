"""The meaning of a packed linear in plain torch."""

from __future__ import annotations

import torch

from qengine_kernels.wna16_gemm.layout import PackedWeight, unpack_words


def dequantize_reference(weight: PackedWeight) -> torch.Tensor:
    """float32 [K, N]: (code - zero) * scale."""
    codes = unpack_words(weight.words, weight.in_features, weight.bits).float()
    group = torch.arange(weight.in_features, device=codes.device) // weight.group_size
    zero = weight.symmetric_zero if weight.zeros is None else weight.zeros.float()[group]
    return (codes - zero) * weight.scales.float()[group]


def wna16_reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [M, N]."""
    y = x.float() @ dequantize_reference(weight)
    return y if bias is None else y + bias.float()
