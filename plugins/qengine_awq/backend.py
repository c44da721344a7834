"""AWQ linears: which tensors they hold, where they run, and how they are bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.plugin import (
    WEIGHT_STD,
    Capability,
    DeviceInfo,
    ExpertsOp,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    Quantizer,
    RandomTensors,
    TensorInfo,
    TensorNeed,
    WeightQuant,
    WeightSample,
    dummy_samples,
    headers_of,
)
from qengine_awq.config import AwqConfig, read_config
from qengine_awq.headers import group_size_of, layout_of
from qengine_awq.layout import SYMMETRIC_ZERO, unpack
from qengine_awq.layouts import GEMM, LAYOUTS, Layout
from qengine_awq.layouts.base import FLOATS, groups_of
from qengine_awq.quantizer import AwqQuantizer
from qengine_awq.reference import dequantize
from qengine_kernels.cpu_linear import Int4CpuLinear, int4_bytes, tuning


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
    """4-bit weights in one of AWQ's layouts; group_size -1 is one group, the last group may be short.

    `keep_dense`: keep the dense copy for large batches on a CPU.
    """

    group_size: int
    zero_point: bool
    keep_dense: bool = True
    layout: Layout = GEMM
    tiles: bool = True
    notes: Sequence[str] = field(default=(), compare=False)

    @property
    def format(self) -> str:  # type: ignore[override]
        kind = "" if self.layout is GEMM else f" {self.layout.name}"
        return f"awq 4-bit g{self.group_size}{kind}" + ("" if self.zero_point else " symmetric")

    @property
    def key(self) -> tuple[Any, ...]:
        return ("awq", self.group_size, self.zero_point, self.keep_dense, self.layout.name, self.tiles)

    def inputs_per_scale(self, spec: LinearSpec) -> int:
        return spec.in_features if self.group_size == -1 else self.group_size

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        needs = self.layout.needs(spec, self.group_size, self.zero_point)
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
        from qengine_kernels.launch import Chip
        from qengine_kernels.wna16_gemm import held_bytes, normal_group_size

        group, chip = normal_group_size(self.group_size, k), Chip.known(device.sm)
        weight = held_bytes(k, n, group, self.zero_point, dtype, chip, tiles=self.tiles)
        return weight + spec.bias * n * dtype.itemsize

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

    def of_experts(self) -> AwqScheme:
        return dataclasses.replace(self, tiles=False)

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        check_finite(shards)
        parts = [self._take(shard, device) for shard in shards]
        qweight, scales = joined(parts, "qweight"), joined(parts, "scales")
        qzeros = joined(parts, "qzeros") if self.zero_point else None
        bias = torch.cat([s.tensors.pop("bias") for s in shards]) if shards[0].spec.bias else None
        if info.type == "cpu":
            return self._bind_cpu(qweight, qzeros, scales, bias, dtype)
        from qengine_awq.kernels import AwqCudaLinear

        placed_bias = None if bias is None else bias.to(device)
        return AwqCudaLinear(qweight, qzeros, scales, placed_bias, self.group_size, dtype, info, tiles=self.tiles)

    def _take(self, shard: LinearShard, device: torch.device) -> dict[str, torch.Tensor]:
        """A shard's tensors on the device, in the gemm layout; consumes all but its bias."""
        own = {leaf: shard.tensors.pop(leaf).to(device) for leaf in list(shard.tensors) if leaf != "bias"}
        try:
            return self.layout.to_gemm(shard.spec, own, self.group_size)
        except ValueError as e:
            raise ValueError(f"{shard.spec.name}: {e}") from e

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_awq.kernels import AwqCudaExperts, AwqCudaLinear, chip_of

        def bind_one(shards: Sequence[LinearShard]) -> AwqCudaLinear:
            op = self.of_experts().bind(shards, device, info, dtype)
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
        return dequantize(self.layout.to_gemm(spec, tensors, self.group_size), self.group_size)


def joined(parts: Sequence[dict[str, torch.Tensor]], leaf: str) -> torch.Tensor:
    """One tensor of all shards, stacked along the outputs; consumes them."""
    own = [part.pop(leaf) for part in parts]
    return own[0] if len(own) == 1 else torch.cat(own, dim=1)


def check_finite(shards: Sequence[LinearShard]) -> None:
    """Raises ValueError naming every float tensor of the shards that holds anything but finite numbers."""
    bad = []
    for shard in shards:
        for leaf, t in shard.tensors.items():
            if t.is_floating_point() and (wrong := int((~torch.isfinite(t)).sum())):
                bad.append(f"{shard.spec.name}.{leaf}: {wrong} of {t.numel()} values are not finite")
    if bad:
        raise ValueError("; ".join(bad))


class AwqQuant(WeightQuant):
    """Reads the files of AutoAWQ and llm-awq."""

    name = "awq"
    contract = 1
    methods = ("awq", "auto_awq")

    def __init__(self, config: AwqConfig) -> None:
        self.config = config

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> AwqQuant:
        return cls(read_config(config))

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        if not {"qweight", "qzeros", "scaled_zeros", "scales"} & tensors.keys():
            return None
        c = self.config
        layout = layout_of(spec, tensors, c.layouts[0][1] if c.layouts else None)
        group_size = group_size_of(spec, tensors, layout, c.group_size)
        stored = layout.zeros_in(tensors)
        zero_point = stored or (bool(c.zero_point) and layout.may_have_zeros)
        notes = [
            f"{key} is {value!r} in the config, the tensors have the layout of {layout.name}: the tensors count"
            for key, value in c.layouts
            if value not in layout.stated
        ]
        if stored and c.zero_point is False:
            notes.append("zero_point is false in the config, the file holds zero points: they are used")
        if c.zero_point and not layout.may_have_zeros:
            notes.append(f"zero_point is true in the config, the layout of {layout.name} has none: every zero is 8")
        if any(skip in spec.name for skip in c.skipped):
            notes.append("modules_to_not_convert names what the file holds quantised: the file counts")
        return AwqScheme(group_size, zero_point, layout=layout, notes=tuple(notes))

    def expected(self, spec: LinearSpec) -> Mapping[str, TensorInfo] | None:
        c = self.config
        if spec.out_features % 8 or any(skip in spec.name for skip in c.skipped):
            return None
        layout, size = self._stated()
        zero_point = c.zero_point is not False and layout.may_have_zeros
        return headers_of(AwqScheme(size, zero_point, layout=layout), spec)

    def _stated(self) -> tuple[Layout, int]:
        """Layout and group size by the config alone."""
        c = self.config
        stated = c.layouts[0][1] if c.layouts else GEMM.stated[0]
        layout = next(layout for layout in LAYOUTS if stated in layout.stated)
        return layout, 128 if c.group_size is None else c.group_size

    def dummy(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo], random: RandomTensors
    ) -> dict[str, torch.Tensor]:
        """Scales are those of weights of WEIGHT_STD whose codes and zeros are uniform: their difference has a standard
        deviation of 6.5."""
        scale, (layout, size) = WEIGHT_STD / 6.5, self._stated()
        scales = random.uniform(tensors["scales"], 0.5 * scale, 1.5 * scale)
        used = groups_of(spec.in_features, size)
        scales.narrow(layout.group_dim, used, scales.shape[layout.group_dim] - used).zero_()  # what pads a layout
        made = {}
        for leaf, info in tensors.items():
            if leaf == "bias":
                made[leaf] = random.uniform(info, 0.0, 0.0)
            elif info.dtype in FLOATS:
                made[leaf] = scales if leaf == "scales" else -SYMMETRIC_ZERO * scales
            else:
                made[leaf] = random.bits(info)
        return made

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """The layouts that the quantizer does not make."""
        config = {"quant_method": "awq", "bits": 4, "group_size": 64}
        ways = ({"version": "gemv"}, {"version": "gemv_fast"}, {"version": "gemm", "zero_point": False})
        return dummy_samples(cls, [{"zero_point": True, **config, **way} for way in ways])

    def unread(self, tensor: TensorInfo) -> str | None:
        if tensor.name.endswith(".scales") and len(tensor.shape) == 1:  # a linear's have two dimensions
            return (
                "AutoAWQ divides an activation's output by these scales, which is not done here; what would work: "
                "a copy of the model in another format"
            )
        return None

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        """Options: group_size (default 128; -1 for one group), zero_point (default True)."""
        return AwqQuantizer(**options)
