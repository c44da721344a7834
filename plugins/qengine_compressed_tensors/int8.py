"""int8 weights with int8 activations (W8A8): one scale per output row or tensor, activations quantised as they come."""

from __future__ import annotations

import functools
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
from qengine_compressed_tensors.integers import FLOATS, IntFormat
from qengine_compressed_tensors.weight_only import ANY, bias_need, gpu_capability

LARGEST = 127.5
"""A row's scale is its largest size over half the 255 steps of int8; the largest positive value is then clamped by half
a step. (DEFINITION: compressed-tensors 0.19.0, calculate_qparams.)"""


def quantize_rows(x: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> codes int8 [M, K] and scales float32 [M, 1]: `scale`, or each row's own. A row that is not finite
    gets a scale that isn't."""
    x = x.to(torch.float32)
    largest = x.abs().amax(1, keepdim=True)
    if scale is None:
        scales = largest / LARGEST
        scales = torch.where(scales == 0, 1.0, scales)
    else:
        scales = torch.where(torch.isfinite(largest), scale, float("nan"))
    codes = (x / scales).round_().clamp_(-128, 127).nan_to_num_(0).to(torch.int8)
    return codes, scales


@functools.cache
def exact_int_mm() -> bool:
    """Whether torch's int8 GEMM is exact on this CPU: without VNNI instructions, sums of two products can saturate."""
    largest = torch.full((17, 64), -128, dtype=torch.int8)
    try:
        return bool((torch._int_mm(largest, largest.t().contiguous()) == 64 * 128 * 128).all())
    except RuntimeError:
        return False


class Int8CpuOp(LinearOp):
    """codes int8 [N, K], scales float32 [N], bias [N] or None; `x_scale` None: activations per token."""

    rounds_activations = True

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.codes, self.scales, self.x_scale, self.dtype = codes, scales, x_scale, dtype
        self.out_features, self.in_features = codes.shape
        self.bias = None if bias is None else bias.to(torch.float32)
        how = "int8 GEMM" if exact_int_mm() else "float32 GEMM of int8 values (this CPU's int8 GEMM saturates)"
        self.kernel = f"{how}, int8 activations {'per token' if x_scale is None else 'with the stored scale'}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, scales = quantize_rows(x, self.x_scale)
        if exact_int_mm():
            y = torch._int_mm(rows, self.codes.t()).to(torch.float32)
        else:
            y = rows.to(torch.float32) @ self.codes.t().to(torch.float32)
        y *= scales
        y *= self.scales
        if self.bias is not None:
            y += self.bias
        return y.to(self.dtype)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {"codes": self.codes, "scales": self.scales}
        return named | ({} if self.bias is None else {"bias": self.bias})


@dataclass
class Int8Scheme(LinearScheme):
    """`stored` says how the weight lies in the file: 8 bits, symmetric, one group. `input_scale` is the shape of a
    stored activation scale; None: activations are quantised per token."""

    stored: IntFormat
    input_scale: tuple[int, ...] | None = None
    notes: Sequence[str] = ()

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"compressed-tensors int8 {self.stored.extent}, activations {self.activations}"

    @property
    def activations(self) -> str:
        return "int8 per token" if self.input_scale is None else "int8 static"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("compressed-tensors int8", self.stored, self.input_scale)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        needs = self.stored.tensors(spec)
        if self.input_scale is not None:
            needs.append(TensorNeed("input_scale", self.input_scale, FLOATS))
        needs.append(TensorNeed("input_zero_point", self.input_scale or (1,), ANY, required=False))
        return needs + bias_need(spec)

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        n, k = spec.out_features, spec.in_features
        if device.type == "cpu":
            return n * (k + 4 + 4 * spec.bias)
        return n * (k + 4 + dtype.itemsize * spec.bias) + (0 if self.input_scale is None else 4)

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            return Capability.native("int8 GEMM")
        return gpu_capability(device, dtype, "int8 GEMM")

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        biases = [shard.tensors.pop("bias") for shard in shards] if shards[0].spec.bias else []
        x_scale, notes = self._input_scale(shards)
        codes, scales = [], []
        for shard in shards:
            part = self.stored.decode(shard.spec, shard.tensors, device)
            shard.tensors.clear()
            codes.append((part.codes - 128).view(torch.int8))  # unsigned to signed, modulo 256
            scales.append(part.scales[:, 0].to(torch.float32))
        weight = codes[0] if len(codes) == 1 else torch.cat(codes)
        bias = torch.cat(biases).to(device) if biases else None
        op: LinearOp
        if info.type == "cpu":
            op = Int8CpuOp(weight, torch.cat(scales), bias, x_scale, dtype)
        else:
            from qengine_compressed_tensors.kernels import Int8CudaLinear

            op = Int8CudaLinear(weight, torch.cat(scales), bias, x_scale, dtype, info)
        op.notes = notes
        return op

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_compressed_tensors.experts import Int8CudaExperts
        from qengine_compressed_tensors.kernels import chip_of

        def bind_one(shards: Sequence[LinearShard]) -> LinearOp:
            return self.bind(shards, device, info, dtype)

        return Int8CudaExperts(spec, count, chip_of(device, info), bind_one)

    def _input_scale(self, shards: Sequence[LinearShard]) -> tuple[float | None, list[tuple[str, str]]]:
        """Fused shards see the same activations; the largest of their scales clips none of them."""
        for shard in shards:
            zero = shard.tensors.pop("input_zero_point", None)
            if zero is not None and bool(zero.to(torch.float32).count_nonzero()):
                raise ValueError(f"{shard.spec.name}.input_zero_point is not zero; need: symmetric activations")
        if self.input_scale is None:
            return None, []
        found = [positive(shard) for shard in shards]
        note = "input_scale differs among fused modules, which share their input: the largest counts"
        return max(found), [(shards[0].spec.name, note)] if len(set(found)) > 1 else []

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.stored.dequantize(spec, tensors)


def positive(shard: LinearShard) -> float:
    """The stored activation scale of a shard; consumes it."""
    value = float(shard.tensors.pop("input_scale").to(torch.float32).reshape(()))
    if not 0 < value < float("inf"):
        raise ValueError(f"{shard.spec.name}.input_scale is {value}; need: finite and positive")
    return value
