"""GPTQ on a GPU: codes are repacked once, then run through the shared weight-only kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearOp, LinearShard, LinearSpec
from qengine_gptq.shards import Decoded
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm import PackedExperts, describe, grouped_matmul, most_pairs
from qengine_kernels.wna16_gemm import PackedWeight, TiledWeight, held_weight, pack_codes, wna16_matmul


@triton.jit
def unpack_2(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..3 in bits 2 * SLOT, 2 * SLOT + 1."""
    return (words >> (2 * SLOT)) & 0x3


@triton.jit
def unpack_4(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..15 in bits 4 * SLOT .. 4 * SLOT + 3."""
    return (words >> (4 * SLOT)) & 0xF


@triton.jit
def unpack_8(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..255 in bits 8 * SLOT .. 8 * SLOT + 7."""
    return (words >> (8 * SLOT)) & 0xFF


UNPACK: dict[int, Any] = {2: unpack_2, 4: unpack_4, 8: unpack_8}


UNLIKE = "stored unlike the other experts of its layer: they run one after the other, not all at once"


def held_bits(bits: int) -> int:
    """Bits that a code takes on the GPU."""
    return 4 if bits == 3 else bits


def chip_of(device: torch.device, info: DeviceInfo) -> Chip:
    """The chip behind `device`, as far as `info` does not say otherwise."""
    chip = Chip.of(device)
    return replace(chip, sm=info.sm, shared_memory=info.shared_memory or chip.shared_memory) if info.sm else chip


class GptqCudaLinear(LinearOp):
    """y = x[:, order] @ W + b for W[k, n] = (q[k, n] - z[k // group_size, n]) * s[k // group_size, n].

    part        decoded weights on the device where the op runs; 3-bit codes are held in 4 bits
    bias        [N] or None
    symmetric   zeros that are all the middle are not kept
    dtype       of x and y
    info        the device: its compute capability picks the kernels
    tiles       whether the weight may be kept in the layout that only a linear on its own takes

    The arguments are repacked (peak: the codes as one byte each) and not kept. Scales stay in their 16-bit dtype;
    float32 ones become float16, which is what the format defines.
    """

    def __init__(
        self,
        part: Decoded,
        bias: torch.Tensor | None,
        symmetric: bool,
        dtype: torch.dtype,
        info: DeviceInfo,
        *,
        tiles: bool = True,
    ) -> None:
        self.in_features, self.out_features = part.codes.shape
        scales, bits = part.scales, held_bits(part.bits)
        self.bits = bits
        packed = PackedWeight(
            words=pack_codes(part.codes, bits),
            scales=(scales.half() if scales.dtype == torch.float32 else scales).contiguous(),
            zeros=None if symmetric and part.zeros is None else part.zeros_or_middle().contiguous(),
            in_features=self.in_features,
            group_size=part.group_size,
            symmetric_zero=1 << (part.bits - 1),
            bits=bits,
        )
        self.order = part.order
        self.bias = None if bias is None else bias.to(dtype)
        self.chip = chip_of(part.codes.device, info)
        self.weight: PackedWeight | TiledWeight = held_weight(packed, dtype, self.chip) if tiles else packed
        self.kind = f"Triton W{bits}A16"
        if bits != part.bits:
            self.kind += f" ({part.bits}-bit codes held in {bits} bits)"
        if self.order is not None:
            self.kind += ", inputs sorted by group"
        rows = "some hundred rows"
        if not self.chip.tensor_cores:
            rows = f"16 rows (sm_{self.chip.sm}: tl.dot is plain FMA)"
        self.kernel = f"{self.kind}, dequantise + cuBLAS above {rows}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        return wna16_matmul(x, self.weight, self.bias, UNPACK[self.bits], self.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {"order": self.order, "bias": self.bias}
        return self.weight.buffers() | {name: tensor for name, tensor in named.items() if tensor is not None}


class GptqCudaExperts(ExpertsOp):
    """One linear of all experts. `bind_one` binds an expert's alone; its words then move into the stack.

    `ordered`: inputs are expected to be sorted, by each expert in its own way. An expert that is stored unlike the
    others (other zeros than the config says, gate and up sorted differently) keeps its own op, and then all experts run
    one after the other.
    """

    def __init__(
        self,
        spec: LinearSpec,
        count: int,
        ordered: bool,
        chip: Chip,
        bind_one: Callable[[Sequence[LinearShard]], LinearOp],
    ) -> None:
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.experts, self.chip, self.bind_one = PackedExperts(count), chip, bind_one
        self.ordered = ordered
        self.bits = 4
        self.most_pairs = most_pairs(chip, count)

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        op = self.bind_one(shards)
        if not isinstance(op, GptqCudaLinear) or not self._stack(expert, op):
            self.most_pairs = 0
            op.notes = [*op.notes, (shards[0].spec.name, UNLIKE)]
        return op

    def _stack(self, expert: int, op: GptqCudaLinear) -> bool:
        """Move the op's tensors into the stack; False if they don't fit there."""
        columns = op.order
        assert isinstance(op.weight, PackedWeight)
        if self.ordered and columns is None:
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

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.experts.buffers()

    def over(self, stacks: Mapping[str, torch.Tensor]) -> GptqCudaExperts:
        slots = copy(self)
        slots.experts = self.experts.over(stacks)
        return slots

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        weights = pairs.weights if combine else None
        return grouped_matmul(
            x, self.experts.weights, pairs.order, pairs.offsets, pairs.top_k, UNPACK[self.bits], weights, self.chip
        )
