"""e4m3 weights: one scale a tensor, an output row or a block; activations rounded to e4m3 too where the config asks
for it and the device has units for it, weight-only elsewhere. The linears are `qengine_kernels.fp8_linear`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from qengine_compressed_tensors.integers import FLOATS
from qengine_compressed_tensors.weight_only import ANY, bias_need, gpu_capability
from qengine_kernels.cpu_linear import tuning
from qengine_kernels.fp8_linear import Fp8CpuLinear, Fp8Shard, fp8_bytes, holds_nan, native_reason, stack_shards
from qengine_kernels.w8a16_gemm import ByteWeight

ZERO_POINTS = ("weight_zero_point", "input_zero_point")


@dataclass(frozen=True)
class Fp8Format:
    """How e4m3 weights and their scales lie in the file: `scalar` is the shape of a scale that is for all, `block`
    (outputs, inputs) of one that is for a block; with neither, each output has its own. `input_scale` is the shape of
    a stored activation scale. `rounded`: the config asks for e4m3 activations."""

    scalar: tuple[int, ...] | None
    block: tuple[int, int] | None
    rounded: bool
    input_scale: tuple[int, ...] | None = None
    unused: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        if self.block is not None:
            return f"fp8 {self.block[0]}x{self.block[1]} blocks"
        return "fp8 per channel" if self.scalar is None else "fp8 per tensor"

    def scale_shape(self, spec: LinearSpec) -> tuple[int, ...]:
        if self.block is not None:
            return -(-spec.out_features // self.block[0]), -(-spec.in_features // self.block[1])
        return (spec.out_features, 1) if self.scalar is None else self.scalar


class Fp8Op(LinearOp):
    """A bound linear of `qengine_kernels.fp8_linear` as the contract wants it."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = linear.kernel
        self.rounds_activations = getattr(linear, "native", False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y

    def buffers(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = self.linear.buffers()
        return named


@dataclass
class Fp8Scheme(LinearScheme):
    """e4m3 weights, kept as they are stored."""

    stored: Fp8Format
    notes: Sequence[str] = ()

    @property
    def format(self) -> str:  # type: ignore[override]
        if not self.stored.rounded:
            return f"compressed-tensors {self.stored}"
        how = "dynamic" if self.stored.input_scale is None else "static"
        return f"compressed-tensors {self.stored}, {how} activations"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("compressed-tensors", self.stored)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        s = self.stored
        split: dict[str, Any] = {} if s.scalar is not None else {"output_dim": 0, "input_dim": 1}
        needs = [
            TensorNeed("weight", (spec.out_features, spec.in_features), ("F8_E4M3",), output_dim=0, input_dim=1),
            TensorNeed("weight_scale", s.scale_shape(spec), FLOATS, **split),
        ]
        if s.input_scale is not None:
            needs.append(TensorNeed("input_scale", s.input_scale, FLOATS))
        needs += [TensorNeed(leaf, shape, ANY, required=False) for leaf, shape in s.unused]
        return needs + bias_need(spec)

    def inputs_per_scale(self, spec: LinearSpec) -> int:
        return spec.in_features if self.stored.block is None else self.stored.block[1]

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        return fp8_bytes(spec.out_features, spec.in_features, self.stored.block, spec.bias, dtype)

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            return Capability.emulated("weight-only: a CPU has no FP8 GEMM; weights stay one byte")
        answer = gpu_capability(device, dtype, "FP8 GEMM")
        reason = native_reason(device.sm, dtype) if answer and self.stored.rounded else None
        return answer if reason is None else Capability.emulated(f"weight-only: {reason}; weights stay one byte")

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        return self._bind(shards, device, info, dtype, lambda weight: weight)

    def _bind(
        self,
        shards: Sequence[LinearShard],
        device: torch.device,
        info: DeviceInfo,
        dtype: torch.dtype,
        place: Callable[[ByteWeight], ByteWeight],
    ) -> LinearOp:
        """`place` takes the weight on its device and returns the one to keep."""
        parts = [self._shard(shard) for shard in shards]
        bias = torch.cat([s.tensors.pop("bias") for s in shards]) if shards[0].spec.bias else None
        for shard in shards:
            shard.tensors.clear()
        outs = [shard.spec.out_features for shard in shards]
        weight = place(stack_shards(parts, self.stored.block, device))
        if info.type == "cpu":
            return Fp8Op(Fp8CpuLinear(weight, bias, dtype, tuning().dense))
        from qengine_compressed_tensors.kernels import chip_of
        from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear

        scales = [(n, p.input_scale) for n, p in zip(outs, parts, strict=True) if p.input_scale is not None]
        return Fp8Op(
            Fp8CudaLinear(
                weight, None if bias is None else bias.to(device), dtype, chip_of(device, info),
                input_scales=scales or None, native=None if self.stored.rounded else False,
            )
        )  # fmt: skip

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_compressed_tensors.experts import Fp8CudaExperts
        from qengine_compressed_tensors.kernels import chip_of

        def bind_one(shards: Sequence[LinearShard], place: Callable[[ByteWeight], ByteWeight]) -> LinearOp:
            return self._bind(shards, device, info, dtype, place)

        return Fp8CudaExperts(spec, count, chip_of(device, info), bind_one)

    def _shard(self, shard: LinearShard) -> Fp8Shard:
        """Checked parts of one module; consumes its tensors but for the bias."""
        name, tensors = shard.spec.name, shard.tensors
        weight, scale = tensors.pop("weight"), tensors.pop("weight_scale").to(torch.float32)
        if bad := int((~(torch.isfinite(scale) & (scale > 0))).sum()):
            raise ValueError(f"{name}.weight_scale holds {bad} values that are not finite and positive")
        if holds_nan(weight):
            raise ValueError(f"{name}.weight holds NaN")
        for leaf in ZERO_POINTS:
            if leaf in tensors and bool(tensors[leaf].to(torch.float32).count_nonzero()):
                raise ValueError(f"{name}.{leaf} is not zero; need: symmetric FP8")
        input_scale = None
        if self.stored.input_scale is not None:
            input_scale = tensors.pop("input_scale").to(torch.float32).reshape(())
            if not 0 < float(input_scale) < float("inf"):
                raise ValueError(f"{name}.input_scale is {float(input_scale)}; need: finite and positive")
        return Fp8Shard(weight, scale.reshape(()) if self.stored.scalar is not None else scale, input_scale)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight, scale = tensors["weight"].to(torch.float32), tensors["weight_scale"].to(torch.float32)
        if self.stored.block is not None:
            rows, columns = self.stored.block
            scale = scale.repeat_interleave(rows, 0)[: spec.out_features].repeat_interleave(columns, 1)
            scale = scale[:, : spec.in_features]
        return weight * (scale.reshape(()) if self.stored.scalar is not None else scale)
