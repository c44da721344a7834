"""What AWQ tensors mean, in plain float32 torch: W[n, k] = (q[k, n] - z[k // group, n]) * s[k // group, n]."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine_awq.layout import SYMMETRIC_ZERO, unpack


def dequantize(tensors: Mapping[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """qweight, scales and perhaps qzeros -> float32 [N, K]. Group size -1 is one group; the last may be short."""
    codes = unpack(tensors["qweight"]).to(torch.float32)
    in_features = codes.shape[0]
    size = in_features if group_size == -1 else group_size
    zeros = unpack(tensors["qzeros"]).to(torch.float32) if "qzeros" in tensors else float(SYMMETRIC_ZERO)
    scales = tensors["scales"].to(torch.float32)
    if in_features % size == 0:  # no gather as large as the weight
        grouped = codes.unflatten(0, (-1, size))
        grouped.sub_(zeros[:, None] if isinstance(zeros, torch.Tensor) else zeros).mul_(scales[:, None])
        return codes.t()
    group = torch.arange(in_features) // size
    return ((codes - (zeros[group] if isinstance(zeros, torch.Tensor) else zeros)) * scales[group]).t()
