"""What group-quantised weights mean, in plain float32 torch."""

from __future__ import annotations

import torch

AT_ONCE = 1 << 20
"""Weights that are float32 at a time where the result is not: the cost of a fresh large tensor is its pages."""


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_size: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(codes [N, K] - zeros [N, G]) * scales [N, G], computed in float32 -> `dtype` [N, K].

    A group is `group_size` neighbouring inputs, -1: all of them; the last one may be short.
    """
    n, k = codes.shape
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    step = min(n, max(1, AT_ONCE // k))
    wide = torch.empty(step, k, device=codes.device) if dtype is not torch.float32 else None
    for first in range(0, n, step):
        rows = slice(first, first + step)
        part = out[rows] if wide is None else wide[: min(step, n - first)]
        part.copy_(codes[rows])
        _scale(part, scales[rows].float(), zeros[rows].float(), k if group_size == -1 else group_size)
        if wide is not None:
            out[rows] = part
    return out


def _scale(w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int) -> None:
    """In place, without a tensor of scales as large as the weight."""
    groups = w.shape[1] // size
    whole = groups * size
    w[:, :whole].unflatten(1, (groups, size)).sub_(zeros[:, :groups, None]).mul_(scales[:, :groups, None])
    if whole < w.shape[1]:
        w[:, whole:].sub_(zeros[:, -1:]).mul_(scales[:, -1:])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias, in float32."""
    y = x.float() @ weight.float().t()
    return y if bias is None else y + bias.float()
