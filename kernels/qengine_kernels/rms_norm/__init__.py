"""RMS normalisation over the last dimension, with an optional fused residual add."""

from __future__ import annotations

import torch

from qengine_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), computed in float32.

    x         [..., H] any float dtype; the last dimension is contiguous
    weight    [H]; `weight_offset` is 1.0 for Gemma, whose files store weight - 1
    residual  [..., H], its own dtype (float32 where float16 would overflow): `residual += x` happens in place and the
              sum is what gets normalised
    dtype     of the result; that of x when None

    CUDA tensors run one Triton kernel, others plain torch.
    """
    if not x.is_cuda:
        return rms_norm_reference(x, weight, eps, residual, weight_offset=weight_offset, dtype=dtype)
    from qengine_kernels.rms_norm.kernel import launch_rms_norm

    return launch_rms_norm(x, weight, eps, residual, weight_offset=weight_offset, dtype=dtype)
