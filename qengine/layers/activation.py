"""Gated activations of feed-forward layers, and the plain ones that they are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from qengine_kernels import cpu_fused
from qengine_kernels.gated_activation import KINDS, gated_activation, power_of_two, scaled_activation

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
"""By the name that a checkpoint's config gives."""

LIMIT = 64.0
"""Of what the second linear of a feed-forward reads in float16: its sums then stay finite up to 1023 in the sum of a
row's absolute weights, whatever their signs."""
KERNEL_KINDS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"} | {k: k for k in KINDS}
"""Names under which the fused GPU kernel knows them; others run as plain torch."""


class GatedActivation:
    """activation(gate) * up, for gate and up lying side by side."""

    def __init__(self, kind: str) -> None:
        if kind not in ACTIVATIONS:
            raise ValueError(f"unknown activation {kind!r}; known: {', '.join(sorted(ACTIVATIONS))}")
        self.kind = kind
        self.function = ACTIVATIONS[kind]
        self.kernel = KERNEL_KINDS.get(kind)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> [T, I], same dtype."""
        if gate_up.is_cuda and self.kernel is not None:
            return gated_activation(gate_up, self.kernel)
        if self.kernel is not None and cpu_fused.takes(gate_up, gate_up.dtype):
            return cpu_fused.gated_activation(gate_up, self.kernel)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.function(gate).mul_(up)

    def scaled(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As a call, rows that would leave +-LIMIT divided by a power of two: ([T, I], scale float32 [T, 1])."""
        if self.kernel is not None:
            return scaled_activation(gate_up, self.kernel, LIMIT)
        gate, up = gate_up.float().chunk(2, dim=-1)
        y = self.function(gate).mul_(up)
        scale = power_of_two(y.abs().amax(-1, keepdim=True) / LIMIT)
        return (y / scale).to(gate_up.dtype), scale
