"""What AWQ tensors mean, in plain float32 torch: W[n, k] = (q[k, n] - z[k // group, n]) * s[k // group, n]."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine_awq.layout import SYMMETRIC_ZERO, unpack


def dequantize(tensors: Mapping[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """qweight, scales and perhaps qzeros -> float32 [N, K]. Group size -1 is one group; the last may be short."""
    codes = unpack(tensors["qweight"]).to(torch.float32)
    in_features = codes.shape[0]
    group = torch.arange(in_features) // (in_features if group_size == -1 else group_size)
    zeros = unpack(tensors["qzeros"]).to(torch.float32)[group] if "qzeros" in tensors else float(SYMMETRIC_ZERO)
    return ((codes - zeros) * tensors["scales"].to(torch.float32)[group]).t()
