"""FP8 linears: which tensors they hold, where they run, and how they are bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qengine.plugin import (
    E4M3_MAX,
    E4M3_STD,
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
from qengine_fp8.config import Fp8Config, read_config
from qengine_fp8.headers import FLOATS, INPUT_LEAVES, SCALE_LEAVES, Stored, read_headers
from qengine_fp8.quantizer import quantizer, stays_dense
from qengine_fp8.reference import dequantize
from qengine_kernels.cpu_linear import tuning
from qengine_kernels.fp8_linear import (
    Fp8CpuLinear,
    Fp8Shard,
    fp8_bytes,
    holds_nan,
    native_reason,
    quantize_weight,
    stack_shards,
)

SCALE_CODES = ("F32", "BF16", "F16", "F8_E8M0")


class Fp8CpuOp(LinearOp):
    """Weight-only, see `qengine_kernels.fp8_linear.cpu`."""

    def __init__(self, linear: Fp8CpuLinear) -> None:
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = linear.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers()


@dataclass(frozen=True)
class Fp8Scheme(LinearScheme):
    """An e4m3 weight with its own scales. `weight_only` forces the mode without rounded activations on every GPU."""

    stored: Stored
    weight_only: bool = False
    notes: tuple[str, ...] = ()

    @property
    def format(self) -> str:  # type: ignore[override]
        block = self.stored.block
        scales = f"block {block[0]}x{block[1]}" if block else f"per {self.stored.granularity}"
        return f"fp8 {scales}" + (", static activations" if self.stored.input_leaf else "")

    @property
    def key(self) -> tuple[Any, ...]:
        stored = self.stored
        return ("fp8", stored.block, stored.input_leaf is not None, stored.divides, self.weight_only)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        shape, blocked = self.stored.scale_shape(spec), self.stored.block is not None
        output_dim = 0 if self.stored.granularity != "tensor" else None
        needs = [
            TensorNeed("weight", (spec.out_features, spec.in_features), ("F8_E4M3",), output_dim=0, input_dim=1),
            TensorNeed(self.stored.scale_leaf, shape, SCALE_CODES, output_dim, 1 if blocked else None),
        ]
        if self.stored.input_leaf is not None:
            shape = (1,) * self.stored.input_rank
            needs.append(TensorNeed(self.stored.input_leaf, shape, SCALE_CODES[:3]))
        return needs + bias_need(spec)

    def inputs_per_scale(self, spec: LinearSpec) -> int:
        return spec.in_features if self.stored.block is None else self.stored.block[1]

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        return fp8_bytes(spec.out_features, spec.in_features, self.stored.block, spec.bias, dtype)

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            return Capability.emulated("weight-only mode: weights stay one byte and are decoded for each call")
        if device.sm < 75:
            return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
        if device.sm < 80 and dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        reason = "asked for" if self.weight_only else native_reason(device.sm, dtype)
        if reason is not None:
            return Capability.emulated(f"weight-only mode: weights stay one byte ({reason})")
        return Capability.native("FP8 GEMM on activations rounded to FP8")

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        bias = torch.cat([s.tensors.pop("bias") for s in shards]) if shards[0].spec.bias else None
        parts = self.read(shards, device)
        weight = stack_shards(parts, self.stored.block, device)
        if info.type == "cpu":
            return Fp8CpuOp(Fp8CpuLinear(weight, bias, dtype, tuning().dense))
        from qengine_fp8.kernels import bind_cuda

        inputs = [(len(p.codes), p.input_scale) for p in parts if p.input_scale is not None]
        native = False if self.weight_only else None
        return bind_cuda(weight, None if bias is None else bias.to(device), inputs, info, dtype, native)

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_fp8.kernels import Fp8CudaExperts, chip_of

        alone = dataclasses.replace(self, weight_only=True)
        return Fp8CudaExperts(
            spec, count, chip_of(device, info), lambda shards: alone.bind(shards, device, info, dtype)
        )

    def read(self, shards: Sequence[LinearShard], device: torch.device) -> list[Fp8Shard]:
        """Each shard's tensors, taken out of it. Raises ValueError naming all that cannot be used."""
        parts, broken = [], []
        for shard in shards:
            scale_leaf = next(leaf for leaf in SCALE_LEAVES if leaf in shard.tensors)
            input_leaf = next((leaf for leaf in INPUT_LEAVES if leaf in shard.tensors), "")
            scale = self.stored.multiplier(shard.tensors.pop(scale_leaf))
            own = Fp8Shard(shard.tensors.pop("weight"), scale, shard.tensors.pop(input_leaf, None))
            broken += [f"{shard.spec.name}.{what}" for what in unusable(own, scale_leaf, input_leaf)]
            parts.append(own)
        if broken:
            raise ValueError(", ".join(broken))
        return parts

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale = self.stored.multiplier(tensors[self.stored.scale_leaf])
        return dequantize(tensors["weight"], scale, self.stored.block)


class OnlineFp8Scheme(Fp8Scheme):
    """A 16-bit weight that becomes e4m3 with a scale for each output while it is loaded."""

    @property
    def format(self) -> str:  # type: ignore[override]
        return "fp8 per channel, made at load"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("fp8 at load", self.weight_only)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        shape = (spec.out_features, spec.in_features)
        return [TensorNeed("weight", shape, FLOATS, output_dim=0, input_dim=1), *bias_need(spec)]

    def read(self, shards: Sequence[LinearShard], device: torch.device) -> list[Fp8Shard]:
        parts = []
        for shard in shards:
            try:
                parts.append(quantize_weight(shard.tensors.pop("weight"), device))
            except ValueError as e:
                raise ValueError(f"{shard.spec.name}.weight cannot become FP8: {e}") from e
        return parts

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        made = quantize_weight(tensors["weight"], torch.device("cpu"))
        return dequantize(made.codes.view(torch.float8_e4m3fn), made.scale, None)


def bias_need(spec: LinearSpec) -> list[TensorNeed]:
    return [TensorNeed("bias", (spec.out_features,), FLOATS, output_dim=0)] if spec.bias else []


def unusable(shard: Fp8Shard, scale_leaf: str, input_leaf: str) -> list[str]:
    """The tensors of one module that no reading makes sense of, each with its reason."""
    found = []
    for leaf, scale in ((scale_leaf, shard.scale), (input_leaf, shard.input_scale)):
        if scale is None:
            continue
        wide = scale.to(torch.float32)
        bad = ~(torch.isfinite(wide) & (wide > 0))
        if bad.any():
            value = wide[bad].flatten()[0].item()
            found.append(f"{leaf} holds {value:g} ({int(bad.sum())} of {bad.numel()}); scales are finite and positive")
    if holds_nan(shard.codes):
        found.append("weight holds NaN")
    return found


class Fp8Quant(WeightQuant):
    """Reads `quant_method` "fp8" in all its families; without a config, converts 16-bit weights at load."""

    name = "fp8"
    contract = 1
    methods = ("fp8",)
    quantizes_at_load = True

    def __init__(self, config: Fp8Config) -> None:
        self.config = config

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> Fp8Quant:
        return cls(read_config(config))

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        stored = read_headers(spec, tensors, self.config)
        if stored is None:
            if "weight" not in tensors or not self.config.at_load or stays_dense(spec):
                return None
            return OnlineFp8Scheme(Stored("channel", "weight_scale", 2))
        rule = self.config.skip_rule(spec.name)
        note = f"the config skips {rule}, but the file holds it in FP8: the file counts"
        return Fp8Scheme(stored, notes=(*stored.notes, *(() if rule is None else (note,))))

    def expected(self, spec: LinearSpec) -> Mapping[str, TensorInfo] | None:
        """Nothing states the granularity of scales that are no blocks: per tensor is planned, a few bytes less than per
        channel. 16-bit weights that are converted as they are loaded are 16-bit in the file."""
        c = self.config
        if c.at_load or c.skip_rule(spec.name) is not None or stays_dense(spec):
            return None
        block = c.of(spec.name)[0][0].block
        if block is not None:
            return headers_of(Fp8Scheme(Stored("block", "weight_scale_inv", 2, block)), spec)
        leaf = "weight_scale_inv" if c.divides else "weight_scale"
        stored = Stored("tensor", leaf, 0, input_leaf="input_scale" if c.static else None)
        return headers_of(Fp8Scheme(stored), spec)

    def dummy(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo], random: RandomTensors
    ) -> dict[str, torch.Tensor]:
        """Activations behind a norm rarely exceed 8: that is what static scales stand for."""
        scale = WEIGHT_STD / E4M3_STD
        made = {}
        for leaf, info in tensors.items():
            if leaf == "weight":
                made[leaf] = random.e4m3(info)
            elif leaf in INPUT_LEAVES:
                made[leaf] = random.uniform(info, 8 / E4M3_MAX, 8 / E4M3_MAX)
            elif leaf in SCALE_LEAVES:
                drawn = random.uniform(info, 0.8 * scale, 1.2 * scale)
                made[leaf] = drawn.reciprocal() if self.config.divides else drawn
            else:
                made[leaf] = random.uniform(info, 0.0, 0.0)
        return made

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """A scale a tensor with a stored one for activations, and a scale a block."""
        config = {"quant_method": "fp8"}
        return dummy_samples(
            cls, [config | {"activation_scheme": "static"}, config | {"weight_block_size": [128, 128]}]
        )

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        return quantizer(**options)

    @classmethod
    def with_kv_scales(cls, config: Mapping[str, Any] | None, granularity: str) -> dict[str, Any] | None:
        """AutoFP8's word for them; its readers know one scale a tensor."""
        if granularity != "tensor":
            return None
        return {**(config or {"quant_method": "fp8"}), "kv_cache_scheme": "static"}
