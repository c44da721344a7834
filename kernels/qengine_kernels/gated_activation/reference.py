"""The meaning of `gated_activation` in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

KINDS = ("silu", "gelu", "gelu_tanh")


def gated_activation_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """See `qengine_kernels.gated_activation.gated_activation`."""
    gate, up = x.float().chunk(2, dim=-1)
    if kind == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    return (gate * up).to(x.dtype)
