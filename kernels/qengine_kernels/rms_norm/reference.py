"""The meaning of `rms_norm` in plain torch."""

from __future__ import annotations

import torch


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `qengine_kernels.rms_norm.rms_norm`; updates `residual` in place."""
    dtype = x.dtype if dtype is None else dtype
    if residual is not None:
        x = residual.add_(x)
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    scale = weight.float()
    if weight_offset:
        scale = scale + weight_offset
    return (x * scale).to(dtype)
