"""AWQ linears: which tensors they hold, where they run, and how they are bound."""

from __future__ import annotations

import dataclasses
import logging
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
    Quantizer,
    TensorInfo,
    TensorNeed,
    WeightQuant,
)
from qengine_awq.config import AwqConfig, read_config
from qengine_awq.headers import check_shapes, group_size_of
from qengine_awq.layout import SYMMETRIC_ZERO, unpack
from qengine_awq.quantizer import AwqQuantizer
from qengine_awq.reference import dequantize
from qengine_kernels.cpu_linear import Int4CpuLinear, int4_bytes, tuning

log = logging.getLogger("qengine.awq")


class AwqCpuOp(LinearOp):
    """int4 for small batches and a dense GEMM above, see `qengine_kernels.cpu_linear`."""

    def __init__(self, linear: Int4CpuLinear) -> None:
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = linear.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers()


@dataclass(frozen=True)
class AwqScheme(LinearScheme):
    """4-bit gemm layout; group_size -1 is one group, the last group may be short.

    `keep_dense`: keep the dense copy for large batches on a CPU.
    """

    group_size: int
    zero_point: bool
    keep_dense: bool = True

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"awq 4-bit g{self.group_size}" + ("" if self.zero_point else " symmetric")

    @property
    def key(self) -> tuple[Any, ...]:
        return ("awq", self.group_size, self.zero_point, self.keep_dense)

    def groups(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        groups, words = self.groups(spec.in_features), spec.out_features // 8
        split: dict[str, Any] = {"output_dim": 1, "input_dim": 0}
        needs = [
            TensorNeed("qweight", (spec.in_features, words), ("I32",), **split),
            TensorNeed("scales", (groups, spec.out_features), ("F16", "BF16", "F32"), **split),
        ]
        if self.zero_point:
            needs.append(TensorNeed("qzeros", (groups, words), ("I32",), **split))
        if spec.bias:
            needs.append(TensorNeed("bias", (spec.out_features,), ("F16", "BF16", "F32"), output_dim=0))
        return needs

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        n, k = spec.out_features, spec.in_features
        if device.type == "cpu":
            t = tuning()
            return int4_bytes(
                n, k, self.group_size, spec.bias, dtype,
                limit=t.int4_limit, preferred=t.dense, keep_dense=self.keep_dense,
            )  # fmt: skip
        from qengine_kernels.wna16_gemm.layout import normal_group_size, packed_bytes

        group = normal_group_size(self.group_size, k)
        return packed_bytes(k, n, group, self.zero_point) + spec.bias * n * dtype.itemsize

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            if dtype is torch.bfloat16:
                return Capability.native("int4 GEMM")
            name = str(dtype).removeprefix("torch.")
            return Capability.emulated(f"dequantised to {name} at load; --dtype bfloat16 runs in 4 bits")
        if device.sm < 75:
            return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
        if device.sm < 80 and dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        return Capability.native("Triton W4A16")

    def compact(self) -> AwqScheme | None:
        """Without the dense copy: about 0.56 instead of 2.56 bytes a weight on a CPU."""
        return dataclasses.replace(self, keep_dense=False) if self.keep_dense else None

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        qweight = join(shards, "qweight")
        scales = join(shards, "scales")
        qzeros = join(shards, "qzeros") if self.zero_point else None
        bias = torch.cat([s.tensors.pop("bias") for s in shards]) if shards[0].spec.bias else None
        if device.type == "cpu":
            return self._bind_cpu(qweight, qzeros, scales, bias, dtype)
        from qengine_awq.kernels import AwqCudaLinear

        zeros = None if qzeros is None else qzeros.to(device)
        placed_bias = None if bias is None else bias.to(device)
        return AwqCudaLinear(qweight.to(device), zeros, scales.to(device), placed_bias, self.group_size, dtype, info)

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if device.type == "cpu" or spec.bias:
            return None
        from qengine_awq.kernels import AwqCudaExperts, AwqCudaLinear, chip_of

        def bind_one(shards: Sequence[LinearShard]) -> AwqCudaLinear:
            op = self.bind(shards, device, info, dtype)
            assert isinstance(op, AwqCudaLinear)
            return op

        return AwqCudaExperts(spec, count, chip_of(device, info), bind_one)

    def _bind_cpu(
        self,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> LinearOp:
        codes = unpack(qweight).t().contiguous()
        zeros = torch.full_like(scales, SYMMETRIC_ZERO) if qzeros is None else unpack(qzeros)
        t = tuning()
        return AwqCpuOp(
            Int4CpuLinear(
                codes, scales.t().float(), zeros.t().float(), self.group_size, bias, dtype,
                limit=t.int4_limit, preferred=t.dense, keep_dense=self.keep_dense,
            )
        )  # fmt: skip

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize(tensors, self.group_size)


def join(shards: Sequence[LinearShard], leaf: str) -> torch.Tensor:
    """One tensor of all shards, stacked along the outputs (dimension 1); consumes them."""
    parts = [shard.tensors.pop(leaf) for shard in shards]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class AwqQuant(WeightQuant):
    """Reads AutoAWQ's gemm layout."""

    name = "awq"
    contract = 1
    methods = ("awq", "auto_awq")

    def __init__(self, config: AwqConfig) -> None:
        self.config = config

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> AwqQuant:
        return cls(read_config(config))

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        if not {"qweight", "qzeros", "scales"} & tensors.keys():
            return None
        check_shapes(spec, tensors)
        group_size = group_size_of(spec, tensors, self.config.group_size)
        zero_point = "qzeros" in tensors or bool(self.config.zero_point)
        if any(skip in spec.name for skip in self.config.skipped):
            log.warning("%s is in modules_to_not_convert, but the file holds it quantised: the file counts", spec.name)
        return AwqScheme(group_size, zero_point)

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        """Options: group_size (default 128; -1 for one group), zero_point (default True)."""
        return AwqQuantizer(**options)
