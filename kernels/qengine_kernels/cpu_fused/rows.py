"""Norms and gated activations of few rows, one call each."""

from __future__ import annotations

import torch

from qengine_kernels.cpu_fused.state import FLOATS, loaded, most_rows

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def takes(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels are there and x [T, size] or [T, heads, size] is few enough, and dense within each row, for
    them. `dtype` is that of the result."""
    if loaded() is None or not x.is_cpu:
        return False
    shape = x.shape
    dense = x.stride(-1) == 1 and (len(shape) == 2 or x.stride(1) == shape[2])
    return shape[0] <= most_rows() and dense and x.dtype in FLOATS and dtype in FLOATS


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, size] or [T, heads, size] -> x / sqrt(mean(x^2) + eps) * weight, contiguous, of `dtype`, computed in
    float32. weight float32 [size] or [heads, size]. residual float32 [T, size], contiguous: x is added to it in place,
    and the sum is normalised."""
    kernels = loaded()
    shape, size = x.shape, x.shape[-1]
    groups = 1 if len(shape) == 2 else shape[1]
    assert kernels is not None and weight.dtype is torch.float32 and weight.numel() == groups * size
    address = 0
    if residual is not None:
        assert residual.dtype is torch.float32 and residual.shape == shape and residual.is_contiguous()
        address = residual.data_ptr()
    out = torch.empty(shape, dtype=dtype)
    kernels.rms_norm(
        x.data_ptr(), FLOATS[x.dtype], x.stride(0), address, weight.data_ptr(), eps,
        out.data_ptr(), FLOATS[dtype], shape[0], groups, size,
    )  # fmt: skip
    return out


def gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """act(x[:, :I]) * x[:, I:] for contiguous x [T, 2 * I], kind of KINDS -> [T, I] in x's dtype, rounded once."""
    kernels = loaded()
    assert kernels is not None and x.is_contiguous()
    rows, width = x.shape
    out = torch.empty((rows, width // 2), dtype=x.dtype)
    kernels.gated(x.data_ptr(), FLOATS[x.dtype], out.data_ptr(), rows, width // 2, KINDS[kind])
    return out
