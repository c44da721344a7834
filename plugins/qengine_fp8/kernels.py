"""FP8 on a GPU: the shared linear as a plugin's op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch

from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearOp, LinearShard, LinearSpec
from qengine_kernels.fp8.device import e4m3_decode_finite
from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm import ByteExperts, describe, grouped_matmul, most_pairs
from qengine_kernels.w8a16_gemm import ByteWeight


class Fp8CudaOp(LinearOp):
    """Native or weight-only, see `qengine_kernels.fp8_linear.cuda`."""

    def __init__(self, linear: Fp8CudaLinear) -> None:
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel, self.rounds_activations = linear.kernel, linear.native

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers()


def bind_cuda(
    weight: ByteWeight,
    bias: torch.Tensor | None,
    input_scales: Sequence[tuple[int, torch.Tensor]],
    info: DeviceInfo,
    dtype: torch.dtype,
    native: bool | None,
) -> Fp8CudaOp:
    """The op on the device where `weight` lies. `info` picks the mode: a compute capability below 8.9 in it means
    weight-only, whatever the GPU is; `native` False does too. No `input_scales`: dynamic activations."""
    chip = chip_of(weight.codes.device, info)
    return Fp8CudaOp(Fp8CudaLinear(weight, bias, dtype, chip, input_scales=input_scales or None, native=native))


def chip_of(device: torch.device, info: DeviceInfo) -> Chip:
    """The chip behind `device`, as `info` describes it."""
    chip = Chip.of(device)
    return replace(chip, sm=info.sm, shared_memory=info.shared_memory or chip.shared_memory) if info.sm else chip


class Fp8CudaExperts(ExpertsOp):
    """One linear of all experts, weight-only: so that a token's result does not depend on how many others are there,
    the experts' own linears (for large batches) are weight-only too. `bind_one` binds one of them; its bytes then move
    into the stack."""

    def __init__(
        self, spec: LinearSpec, count: int, chip: Chip, bind_one: Callable[[Sequence[LinearShard]], LinearOp]
    ) -> None:
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.experts, self.chip, self.bind_one = ByteExperts(count), chip, bind_one
        self.most_pairs = most_pairs(chip, count)

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        op = self.bind_one(shards)
        assert isinstance(op, Fp8CudaOp)
        op.linear.weight = self.experts.put(expert, op.linear.weight)
        op.kernel = describe("weight-only FP8: Triton W8A16", self.most_pairs)
        return op

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.experts.buffers()

    def over(self, stacks: Mapping[str, torch.Tensor]) -> Fp8CudaExperts:
        slots = copy(self)
        slots.experts = self.experts.over(stacks)
        return slots

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        weights = pairs.weights if combine else None
        return grouped_matmul(
            x, self.experts.weights, pairs.order, pairs.offsets, pairs.top_k, e4m3_decode_finite, weights, self.chip
        )
