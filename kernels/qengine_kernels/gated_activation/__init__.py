"""The gate of a gated MLP: act(gate) * up over one fused [gate, up] tensor."""

from __future__ import annotations

import torch

from qengine_kernels.gated_activation.reference import KINDS, gated_activation_reference

__all__ = ["KINDS", "gated_activation"]


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
