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
    scales = tensors["scales"].to(torch.float32)
    zeros = unpack(tensors["qzeros"]).float() if "qzeros" in tensors else torch.full_like(scales, SYMMETRIC_ZERO)
    for rows, z, s in zip(codes.split(size), zeros, scales, strict=True):  # no gather as large as the weight
        rows.sub_(z).mul_(s)
    return codes.t()
