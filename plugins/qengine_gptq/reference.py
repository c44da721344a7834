"""What GPTQ tensors mean, in plain float32 torch: W[n, k] = (q[k, n] - z[g_idx[k], n]) * s[g_idx[k], n]."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine_gptq.layout import unpack
from qengine_gptq.order import read_order
from qengine_gptq.zeros import ZeroRule, read_zeros


def dequantize(
    tensors: Mapping[str, torch.Tensor], bits: int, in_features: int, group_size: int, rule: ZeroRule, act_order: bool
) -> torch.Tensor:
    """qweight, qzeros, scales and perhaps g_idx -> float32 [N, K]; `group_size` is at least 1."""
    scales = tensors["scales"].to(torch.float32)
    groups, n = scales.shape
    codes = unpack(tensors["qweight"], bits, in_features).to(torch.float32)
    zeros, _ = read_zeros(tensors["qzeros"], bits, n, rule)
    zero = torch.full_like(scales, 1 << (bits - 1)) if zeros is None else zeros.to(torch.float32)
    order, _ = read_order(tensors.get("g_idx"), in_features, group_size, groups, act_order)
    if order is not None:
        group = tensors["g_idx"].to(torch.int64)
        return ((codes - zero[group]) * scales[group]).t()
    for rows, z, s in zip(codes.split(group_size), zero, scales, strict=True):  # no gather as large as the weight
        rows.sub_(z).mul_(s)
    return codes.t()
