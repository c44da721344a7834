"""What group-quantised weights mean, in plain float32 torch."""

from __future__ import annotations

import torch


def group_index(in_features: int, group_size: int) -> torch.Tensor:
    """int64 [K]: the group of each input channel; -1 means one group, the last group may be short."""
    size = in_features if group_size == -1 else group_size
    return torch.arange(in_features) // size


def dequantize(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int) -> torch.Tensor:
    """(codes [N, K] - zeros [N, G]) * scales [N, G] -> float32 [N, K]."""
    w = codes.to(torch.float32)
    size = codes.shape[1] if group_size == -1 else group_size
    if codes.shape[1] % size == 0:  # no gather as large as the weight: a tenth of the time
        w.unflatten(1, (-1, size)).sub_(zeros.float()[:, :, None]).mul_(scales.float()[:, :, None])
        return w
    index = group_index(codes.shape[1], group_size)
    w -= zeros.to(torch.float32)[:, index]
    w *= scales.to(torch.float32)[:, index]
    return w


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias, in float32."""
    y = x.float() @ weight.float().t()
    return y if bias is None else y + bias.float()
