"""Rotary position embedding in the half-split ("neox") style, in place."""

from __future__ import annotations

import torch

from qengine_kernels.rotary.reference import rotary_reference_


def rotary_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first R dimensions of every head in place; the rest (partial rotary) stays as it is.

    q, k      [T, heads, D] each with its own number of heads, any strides but 1 in the last dimension (so views of a
              fused qkv work)
    cos, sin  float32 [T, R / 2], one row per token, already scaled where a RoPE variant scales them

    For d < R/2: x[d], x[d + R/2] = x[d] * cos - x[d + R/2] * sin, x[d + R/2] * cos + x[d] * sin, in float32.
    CUDA tensors run one Triton kernel for q and k together, others plain torch.
    """
    if not q.is_cuda:
        rotary_reference_(q, k, cos, sin)
        return
    from qengine_kernels.rotary.kernel import launch_rotary

    launch_rotary(q, k, cos, sin)
