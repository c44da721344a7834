"""The experts of a mixture as one grouped GEMM on a GPU, for each way that compressed-tensors stores them.

Grouped, activations stay as they are even where the config asks for rounded ones: few rows an expert are bound by
reading weights. Above `most_pairs` each expert's own linear runs, as it would without a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import torch

from qengine.plugin import ExpertPairs, ExpertsOp, LinearOp, LinearShard, LinearSpec
from qengine_compressed_tensors.kernels import UNPACK, Int8CudaLinear, IntCudaLinear, int8_decode
from qengine_kernels.fp8.device import e4m3_decode_finite
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm import ByteExperts, PackedExperts, describe, grouped_matmul, most_pairs
from qengine_kernels.w8a16_gemm import ByteWeight
from qengine_kernels.wna16_gemm import PackedWeight

UNLIKE = "stored unlike the other experts of its layer: they run one after the other, not all at once"

Bind = Callable[[Sequence[LinearShard]], LinearOp]


class GroupedExperts(ExpertsOp):
    """What the three kinds share."""

    experts: PackedExperts | ByteExperts

    def __init__(self, spec: LinearSpec, count: int, chip: Chip) -> None:
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.chip = chip
        self.most_pairs = most_pairs(chip, count)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.experts.buffers()

    def over(self, stacks: Mapping[str, torch.Tensor]) -> GroupedExperts:
        slots = copy(self)
        slots.experts = self.experts.over(stacks)
        return slots

    def _grouped(self, unpack: object, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        weights = pairs.weights if combine else None
        return grouped_matmul(
            x, self.experts.weights, pairs.order, pairs.offsets, pairs.top_k, unpack, weights, self.chip
        )


class PackedCudaExperts(GroupedExperts):
    """Integer codes in words. `reordered`: each expert sorts its inputs in its own way; where an expert's shards differ
    in that, or have other scales than the rest, all experts run one after the other."""

    experts: PackedExperts

    def __init__(self, spec: LinearSpec, count: int, reordered: bool, chip: Chip, bind_one: Bind) -> None:
        super().__init__(spec, count, chip)
        self.experts, self.reordered, self.bind_one = PackedExperts(count), reordered, bind_one
        self.bits = 4

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        op = self.bind_one(shards)
        if not isinstance(op, IntCudaLinear) or not self._stack(expert, op):
            self.most_pairs = 0
            op.notes = [*op.notes, (shards[0].spec.name, UNLIKE)]
        return op

    def _stack(self, expert: int, op: IntCudaLinear) -> bool:
        columns = op.order
        assert isinstance(op.weight, PackedWeight)
        if self.reordered and columns is None:
            columns = torch.arange(self.in_features, dtype=torch.int32, device=op.weight.words.device)
        try:
            op.weight = self.experts.put(expert, op.weight, columns)
        except ValueError:
            return False
        if columns is not None:
            op.order = self.experts.stack.tensors["columns"][expert]
        op.kernel = describe(op.kind, self.most_pairs)
        self.bits = op.bits
        return True

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        return self._grouped(UNPACK[self.bits], x, pairs, combine)


class Int8CudaExperts(GroupedExperts):
    """int8 weights, a scale an output row."""

    experts: ByteExperts

    def __init__(self, spec: LinearSpec, count: int, chip: Chip, bind_one: Bind) -> None:
        super().__init__(spec, count, chip)
        self.experts, self.bind_one = ByteExperts(count), bind_one

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        op = self.bind_one(shards)
        assert isinstance(op, Int8CudaLinear)
        op.weight = self.experts.put(expert, op.weight)
        op.kernel = describe("Triton W8A16 on int8 weights", self.most_pairs)
        return op

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        return self._grouped(int8_decode, x, pairs, combine)


class Fp8CudaExperts(GroupedExperts):
    """e4m3 weights with scales by row or block. `bind_one` hands an expert's weight to its second argument and keeps
    what that returns: the same weight, held in the stack."""

    experts: ByteExperts

    def __init__(
        self,
        spec: LinearSpec,
        count: int,
        chip: Chip,
        bind_one: Callable[[Sequence[LinearShard], Callable[[ByteWeight], ByteWeight]], LinearOp],
    ) -> None:
        super().__init__(spec, count, chip)
        self.experts, self.bind_one = ByteExperts(count), bind_one

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        op = self.bind_one(shards, lambda weight: self.experts.put(expert, weight))
        op.kernel = describe("Triton W8A16 on FP8 weights", self.most_pairs)
        return op

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        return self._grouped(e4m3_decode_finite, x, pairs, combine)
