"""AWQ on a GPU: the checkpoint's words are repacked once, then run through the shared weight-only kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
import triton
import triton.language as tl

from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearOp, LinearShard, LinearSpec
from qengine_awq.layout import unpack
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm import PackedExperts, describe, grouped_matmul, most_pairs
from qengine_kernels.wna16_gemm import (
    PackedWeight,
    TiledWeight,
    held_weight,
    normal_group_size,
    pack_codes,
    wna16_matmul,
)


@triton.jit
def unpack_nibble(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..15 in bits 4 * SLOT .. 4 * SLOT + 3."""
    return (words >> (4 * SLOT)) & 0xF


def chip_of(device: torch.device, info: DeviceInfo) -> Chip:
    """The chip behind `device`, as far as `info` does not say otherwise."""
    chip = Chip.of(device)
    return replace(chip, sm=info.sm, shared_memory=info.shared_memory or chip.shared_memory) if info.sm else chip


class AwqCudaLinear(LinearOp):
    """y = x @ W + b for W[k, n] = (q[k, n] - z[k // group_size, n]) * s[k // group_size, n].

    qweight     int32 [K, N / 8], qzeros int32 [G, N / 8] or None (every zero is 8), scales [G, N], bias [N] or None,
                all on the device where the op runs; group_size -1 is one group, the last one may be short
    dtype       of x and y
    info        the device: its compute capability picks the kernels
    tiles       whether the weight may be kept in the layout that only a linear on its own takes

    The arguments are repacked (peak: the codes as one byte each) and not kept. Scales stay in their 16-bit dtype;
    float32 ones become float16, which is what the format defines.
    """

    def __init__(
        self,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int,
        dtype: torch.dtype,
        info: DeviceInfo,
        *,
        tiles: bool = True,
    ) -> None:
        self.in_features, self.out_features = qweight.shape[0], qweight.shape[1] * 8
        group = normal_group_size(group_size, self.in_features)
        need = (-(-self.in_features // group), self.out_features)
        if tuple(scales.shape) != need:
            raise ValueError(f"AWQ scales have shape {tuple(scales.shape)}; need {need} for group size {group}")
        packed = PackedWeight(
            words=pack_codes(unpack(qweight)),
            scales=(scales.half() if scales.dtype == torch.float32 else scales).contiguous(),
            zeros=None if qzeros is None else unpack(qzeros),
            in_features=self.in_features,
            group_size=group,
        )
        self.bias = None if bias is None else bias.to(dtype)
        self.chip = chip_of(qweight.device, info)
        self.weight: PackedWeight | TiledWeight = held_weight(packed, dtype, self.chip) if tiles else packed
        self.kernel = "Triton W4A16, dequantise + cuBLAS above some hundred rows"
        if not self.chip.tensor_cores:
            self.kernel = f"Triton W4A16, dequantise + cuBLAS above 16 rows (sm_{self.chip.sm}: tl.dot is plain FMA)"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return wna16_matmul(x, self.weight, self.bias, unpack_nibble, self.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.weight.buffers() | ({} if self.bias is None else {"bias": self.bias})


class AwqCudaExperts(ExpertsOp):
    """One linear of all experts. `bind_one` binds an expert's alone; its words then move into the stack."""

    def __init__(
        self, spec: LinearSpec, count: int, chip: Chip, bind_one: Callable[[Sequence[LinearShard]], AwqCudaLinear]
    ) -> None:
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.experts, self.chip, self.bind_one = PackedExperts(count), chip, bind_one
        self.most_pairs = most_pairs(chip, count)

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        op = self.bind_one(shards)
        assert isinstance(op.weight, PackedWeight)
        op.weight = self.experts.put(expert, op.weight)
        op.kernel = describe("Triton W4A16", self.most_pairs)
        return op

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.experts.buffers()

    def over(self, stacks: Mapping[str, torch.Tensor]) -> AwqCudaExperts:
        slots = copy(self)
        slots.experts = self.experts.over(stacks)
        return slots

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        weights = pairs.weights if combine else None
        return grouped_matmul(
            x, self.experts.weights, pairs.order, pairs.offsets, pairs.top_k, unpack_nibble, weights, self.chip
        )
