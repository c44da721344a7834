"""What FP8 tensors mean, in plain float32 torch."""

from __future__ import annotations

import torch


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """float8_e4m3fn [N, K] times its scale -> float32 [N, K].

    `scale`: one number, [N] or [N, 1] by output, or a grid by `block`: W[n, k] = weight[n, k] * scale[n // block[0],
    k // block[1]].
    """
    wide, factor = weight.to(torch.float32), scale.to(torch.float32)
    if block is None:
        return wide * factor.reshape(-1, 1)
    n, k = wide.shape
    return wide * factor[torch.arange(n) // block[0]][:, torch.arange(k) // block[1]]
