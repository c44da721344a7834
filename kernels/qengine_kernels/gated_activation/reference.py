"""The meaning of `gated_activation` in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

KINDS = ("silu", "gelu", "gelu_tanh")


def gated_activation_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """See `qengine_kernels.gated_activation.gated_activation`."""
    return _product(x, kind).to(x.dtype)


def scaled_activation_reference(x: torch.Tensor, kind: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qengine_kernels.gated_activation.scaled_activation`."""
    y = _product(x, kind)
    scale = power_of_two(y.abs().amax(-1, keepdim=True) / limit)
    return (y / scale).to(x.dtype), scale


def power_of_two(ratio: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least each ratio and at least 1; float32."""
    mantissa, exponent = torch.frexp(ratio)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(ratio), exponent.clamp_min(0))
    return torch.where(torch.isfinite(ratio), scale, ratio)


def _product(x: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    if kind == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    return gate * up
