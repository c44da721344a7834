"""Linears that keep integer weights and compute with 16-bit (or float32) activations: W2 to W8, A16."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qengine.plugin import (
    Capability,
    DeviceInfo,
    ExpertsOp,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    TensorNeed,
)
from qengine_compressed_tensors.integers import FLOATS, Codes, IntFormat, joined, same_order
from qengine_kernels.cpu_linear import (
    DenseCpuLinear,
    Int4CpuLinear,
    Int8CpuLinear,
    dense_bytes,
    int4_bytes,
    int8_bytes,
    kept_dtype,
    tuning,
    used_group,
)


class IntCpuLinear(LinearOp):
    """A linear of `qengine_kernels.cpu_linear`: int4 beside a dense GEMM, 8 bits as two halves, or a dense GEMM."""

    def __init__(
        self, linear: Int4CpuLinear | Int8CpuLinear | DenseCpuLinear, order: torch.Tensor | None, bits: int
    ) -> None:
        self.linear, self.order = linear, order
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = linear.kernel
        if isinstance(linear, DenseCpuLinear):
            self.kernel = f"{bits}-bit dequantised to {linear.kernel}"
        elif bits != (held := 4 if isinstance(linear, Int4CpuLinear) else 8):
            self.kernel += f"; {bits}-bit codes are held in {held} bits"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.order is None else x.index_select(1, self.order))

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers() | ({} if self.order is None else {"order": self.order})


class SideBySide(LinearOp):
    """Shards whose input channels are ordered differently: each reorders and multiplies on its own."""

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        self.ops = list(ops)
        self.in_features = ops[0].in_features
        self.out_features = sum(op.out_features for op in ops)
        self.kernel = f"{ops[0].kernel}; fused shards run one by one, because their channel orders differ"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([op(x) for op in self.ops], dim=1)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{name}": t for i, op in enumerate(self.ops) for name, t in op.buffers().items()}


@dataclass
class WeightOnlyInt(LinearScheme):
    """`stored` says how the weight lies in the file. `unused` are leaves that the file may hold beside it and that
    are not needed when activations stay as they are (static activation scales). `keep_dense`: keep a dense copy for
    large batches on a CPU."""

    stored: IntFormat
    unused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    notes: Sequence[str] = ()
    keep_dense: bool = True
    tiles: bool = True
    splits_inputs = splits_outputs = False  # weight_shape states the whole's shape

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"compressed-tensors {self.stored}"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("compressed-tensors", self.stored, self.unused, self.keep_dense, self.tiles)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        needs = self.stored.tensors(spec)
        needs += [TensorNeed(leaf, shape, ANY, required=False) for leaf, shape in self.unused]
        return needs + bias_need(spec)

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        n, k, s = spec.out_features, spec.in_features, self.stored
        order = 4 * k if s.reordered else 0  # once, where shards that run fused agree on it
        if device.type == "cpu":
            t, keep = tuning(), self.keep_dense
            if not self.keeps_codes(k, dtype):
                return dense_bytes(n, k, spec.bias, dtype, t.dense)
            shape = (n, k, s.group_size, spec.bias, dtype)
            if s.bits <= 4:
                return order + int4_bytes(*shape, limit=t.int4_limit, preferred=t.dense, keep_dense=keep)
            return order + int8_bytes(*shape, preferred=t.dense, keep_dense=keep)
        from qengine_kernels.launch import Chip
        from qengine_kernels.wna16_gemm import held_bytes, normal_group_size

        group = normal_group_size(s.group_size, k)
        held = next(b for b in (2, 4, 8) if b >= s.bits)
        kept = (s.scale_bytes, held, self.tiles)
        size = held_bytes(k, n, group, s.zeros is not None, dtype, Chip.known(device.sm), *kept)
        return order + size + spec.bias * n * dtype.itemsize

    def keeps_codes(self, in_features: int, dtype: torch.dtype) -> bool:
        """Whether codes are kept on a CPU; else only dequantised weights are, whose channels need no reordering."""
        if self.stored.bits > 4:
            return not self.keep_dense and used_group(in_features, self.stored.group_size, dtype, 1, False) is not None
        return used_group(in_features, self.stored.group_size, dtype, tuning().int4_limit, self.keep_dense) is not None

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            name = str(dtype).removeprefix("torch.")
            if self.stored.bits <= 4 and dtype is torch.bfloat16:
                return Capability.native("int4 GEMM")
            return Capability.emulated(f"dequantised to {name} at load")
        return gpu_capability(device, dtype, "Triton weight-only")

    def compact(self) -> WeightOnlyInt | None:
        """Without the dense copy on a CPU: 0.56 instead of 2.56 bytes a weight at 4 bits, 1.1 instead of 2 at 8."""
        return dataclasses.replace(self, keep_dense=False) if self.keep_dense else None

    def of_experts(self) -> WeightOnlyInt:
        return dataclasses.replace(self, tiles=False)

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        biases = [shard.tensors.pop("bias") if shard.spec.bias else None for shard in shards]
        parts = []
        for shard in shards:
            parts.append(self.stored.decode(shard.spec, shard.tensors, device))
            shard.tensors.clear()
        bias = torch.cat([b for b in biases if b is not None]) if shards[0].spec.bias else None
        if info.type == "cpu" and not self.keeps_codes(shards[0].spec.in_features, dtype):
            way = tuning().dense
            kept = kept_dtype(shards[0].spec.in_features, dtype, way)
            dense = torch.cat([self.stored.dense(part, kept) for part in parts])
            return IntCpuLinear(DenseCpuLinear(dense, bias, dtype, way), None, self.stored.bits)
        if not same_order(parts):
            pairs = zip(parts, biases, strict=True)
            return SideBySide([self._op(part, own, device, info, dtype) for part, own in pairs])
        weight = joined(parts)
        parts.clear()
        return self._op(weight, bias, device, info, dtype)

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_compressed_tensors.experts import PackedCudaExperts
        from qengine_compressed_tensors.kernels import chip_of

        def bind_one(shards: Sequence[LinearShard]) -> LinearOp:
            return self.of_experts().bind(shards, device, info, dtype)

        return PackedCudaExperts(spec, count, self.stored.reordered, chip_of(device, info), bind_one)

    def _op(
        self, w: Codes, bias: torch.Tensor | None, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        s = self.stored
        if info.type != "cpu":
            from qengine_compressed_tensors.kernels import IntCudaLinear

            placed = None if bias is None else bias.to(device)
            return IntCudaLinear(w, s.bits, s.middle, s.group_size, placed, dtype, info, tiles=self.tiles)
        # The kernels round (8 - zero) * scale to bfloat16 (128 in 8 bits): fewer bits are moved to their middle, where
        # that is exactly or nearly 0.
        shift = (8 if s.bits <= 4 else 128) - s.middle
        codes = w.codes + shift if shift else w.codes
        zeros = torch.full_like(w.scales, s.middle, dtype=torch.float32) if w.zeros is None else w.zeros.float()
        t = tuning()
        linear: Int4CpuLinear | Int8CpuLinear
        arguments = (codes, w.scales.float(), zeros + shift, s.group_size, bias, dtype)
        if s.bits <= 4:
            linear = Int4CpuLinear(*arguments, limit=t.int4_limit, preferred=t.dense, keep_dense=self.keep_dense)
        else:
            linear = Int8CpuLinear(*arguments, preferred=t.dense, keep_dense=self.keep_dense)
        return IntCpuLinear(linear, w.order, s.bits)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.stored.dequantize(spec, tensors)


ANY = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "I16", "I8", "U8")
"""Dtypes of tensors that are not needed."""


def bias_need(spec: LinearSpec) -> list[TensorNeed]:
    return [TensorNeed("bias", (spec.out_features,), (*FLOATS, "F64"), output_dim=0)] if spec.bias else []


def gpu_capability(device: DeviceInfo, dtype: torch.dtype, reason: str) -> Capability:
    """What every kernel here asks of a GPU."""
    if device.sm < 75:
        return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
    if device.sm < 80 and dtype is torch.bfloat16:
        return Capability.refused(
            f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
        )
    return Capability.native(reason)
