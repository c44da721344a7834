"""The gate of a gated MLP: act(gate) * up over one fused [gate, up] tensor."""

from __future__ import annotations

import torch

from qengine_kernels.gated_activation.reference import (
    KINDS,
    gated_activation_reference,
    power_of_two,
    scaled_activation_reference,
)

__all__ = ["KINDS", "gated_activation", "power_of_two", "scaled_activation"]


def gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """act(x[:, :I]) * x[:, I:], computed in float32.

    x     [T, 2 * I], contiguous rows; the gate comes first
    kind  "silu", "gelu" (erf) or "gelu_tanh"; anything else raises ValueError
    Returns [T, I] in x's dtype. CUDA tensors run one Triton kernel, others plain torch.
    """
    if kind not in KINDS:
        raise ValueError(f"gated activation {kind!r} is unknown; known: {', '.join(KINDS)}")
    if not x.is_cuda:
        return gated_activation_reference(x, kind)
    from qengine_kernels.gated_activation.kernel import launch_gated_activation

    return launch_gated_activation(x, kind)


def scaled_activation(x: torch.Tensor, kind: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, each row divided by the smallest power of two, at least 1, that brings it within +-limit.

    Dividing by a power of two loses nothing, so in float16 products beyond its range survive, and so do sums of them.
    Returns ([T, I] in x's dtype, scale float32 [T, 1]). A row that is not finite gets a scale that is not.
    """
    if kind not in KINDS:
        raise ValueError(f"gated activation {kind!r} is unknown; known: {', '.join(KINDS)}")
    if not x.is_cuda:
        return scaled_activation_reference(x, kind, limit)
    from qengine_kernels.gated_activation.kernel import launch_scaled_activation

    return launch_scaled_activation(x, kind, limit)
