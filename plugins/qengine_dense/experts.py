"""16-bit (or float32) experts on a GPU: one linear of all of them in one tensor, run as one grouped GEMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch

from qengine.plugin import ExpertPairs, ExpertsOp, LinearOp, LinearShard, LinearSpec
from qengine_dense.backend import DenseCudaOp, join
from qengine_dense.kernels import identity_decode
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm import DenseExperts, describe, grouped_matmul, most_pairs


class DenseCudaExperts(ExpertsOp):
    """Weights of all experts, [experts, out, in] in the compute dtype."""

    def __init__(self, spec: LinearSpec, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.experts, self.device, self.dtype = DenseExperts(count), device, dtype
        self.most_pairs = most_pairs(Chip.of(device), count)

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        weight = join([s.tensors.pop("weight") for s in shards])
        op = DenseCudaOp(self.experts.put(expert, weight.to(self.device, self.dtype)), None)
        op.kernel = describe(f"{str(self.dtype).removeprefix('torch.')} Triton", self.most_pairs)
        return op

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.experts.buffers()

    def over(self, stacks: Mapping[str, torch.Tensor]) -> DenseCudaExperts:
        slots = copy(self)
        slots.experts = self.experts.over(stacks)
        return slots

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        weights = pairs.weights if combine else None
        return grouped_matmul(
            x, self.experts.weights, pairs.order, pairs.offsets, pairs.top_k, identity_decode, weights
        )
