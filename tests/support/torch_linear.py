"""16-bit and float32 linears in plain torch, for tests of layers and models without a plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import (
    Capability,
    DeviceInfo,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    TensorNeed,
)


class TorchLinearOp(LinearOp):
    kernel = "plain torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})


class TorchLinearScheme(LinearScheme):
    format = "torch"
    key = ("torch",)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        weight = TensorNeed("weight", (spec.out_features, spec.in_features), ("F32",), 0, 1)
        return [weight] + ([TensorNeed("bias", (spec.out_features,), ("F32",), 0)] if spec.bias else [])

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        return (spec.out_features * (spec.in_features + spec.bias)) * dtype.itemsize

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        return Capability.native()

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        def stacked(leaf: str) -> torch.Tensor:
            return torch.cat([s.tensors[leaf] for s in shards]).to(device, dtype)

        return TorchLinearOp(stacked("weight"), stacked("bias") if shards[0].spec.bias else None)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float()


def load_leaves(leaves: Sequence[Leaf], state: Mapping[str, torch.Tensor]) -> set[str]:
    """Fill every leaf from a state dict by the names and shapes that it asks for; returns the names taken."""
    taken: set[str] = set()
    for leaf in leaves:
        if isinstance(leaf, Linear):
            leaf.resolve([TorchLinearScheme()] * len(leaf.specs))
        tensors = {}
        for name, need in leaf.needs():
            assert tuple(state[name].shape) == need.shape, f"{name}: {tuple(state[name].shape)} != {need.shape}"
            tensors[name] = state[name].clone()
        taken |= set(tensors)
        leaf.load(tensors)
    return taken
