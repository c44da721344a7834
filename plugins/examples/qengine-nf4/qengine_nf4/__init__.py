"""The weight format `nf4`: 4-bit codes of normally spaced values, with a scale for each group of inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qengine.plugin import (
    Capability,
    DeviceInfo,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    Quantizer,
    RandomTensors,
    TensorInfo,
    TensorNeed,
    WeightQuant,
    headers_of,
)
from qengine_nf4.levels import dequantize
from qengine_nf4.quantizer import NF4Quantizer

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class NF4Scheme(LinearScheme):
    """`decode`: where a CPU decodes: at load, or for each call."""

    group_size: int
    decode: bool = True

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"nf4 g{self.group_size}"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("nf4", self.group_size, self.decode)

    def group(self, in_features: int) -> int:
        return min(self.group_size, in_features)

    def inputs_per_scale(self, spec: LinearSpec) -> int:
        return self.group(spec.in_features)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        n, k = spec.out_features, spec.in_features
        needs = [
            TensorNeed("codes", (n, -(-k // 2)), ("U8",), output_dim=0, input_dim=1),
            TensorNeed("scales", (n, -(-k // self.group_size)), ("F16",), output_dim=0, input_dim=1),
        ]
        return needs + ([TensorNeed("bias", (n,), FLOATS, output_dim=0)] if spec.bias else [])

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize(tensors["codes"], tensors["scales"], spec.in_features, self.group(spec.in_features))

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        n, k = spec.out_features, spec.in_features
        bias, scales = spec.bias * n * dtype.itemsize, n * -(-k // self.group_size) * 2
        if device.type == "cuda":
            return n * -(-k // 8) * 4 + scales + bias
        if not self.decode:
            return n * -(-k // 2) + scales + bias
        from qengine_kernels.cpu_linear import dense_bytes, tuning

        return dense_bytes(n, k, spec.bias, dtype, tuning().dense)

    def compact(self) -> NF4Scheme | None:
        """Half a byte a weight on a CPU, decoded for each call."""
        return dataclasses.replace(self, decode=False) if self.decode else None

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            return Capability.emulated("decoded at load" if self.decode else "decoded for each call")
        if device.sm < 75:
            return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
        if device.sm < 80 and dtype is torch.bfloat16:
            return Capability.refused("bfloat16 needs compute capability 8.0; --dtype half works")
        return Capability.native("Triton NF4")

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        for shard in shards:
            if not torch.isfinite(shard.tensors["scales"]).all():
                raise ValueError(f"{shard.spec.name}: scales are not finite")
        codes = torch.cat([s.tensors.pop("codes") for s in shards]).to(device)
        scales = torch.cat([s.tensors.pop("scales") for s in shards]).to(device)
        bias = torch.cat([s.tensors.pop("bias") for s in shards]).to(device, dtype) if shards[0].spec.bias else None
        k = shards[0].spec.in_features
        if info.type == "cuda":
            from qengine_nf4.kernels import NF4CudaOp

            return NF4CudaOp(codes, scales, bias, k, self.group(k), info)
        from qengine_nf4.cpu import DenseNF4, PackedNF4

        if not self.decode:
            return PackedNF4(codes, scales, bias, k, self.group(k))
        return DenseNF4(dequantize(codes, scales, k, self.group(k)), bias, dtype)


class NF4Quant(WeightQuant):
    """Reads and makes `quant_method` "nf4"."""

    name = "nf4"
    contract = "1.0"
    methods = ("nf4",)

    def __init__(self, group_size: int, skipped: Sequence[str]) -> None:
        self.group_size, self.skipped = group_size, tuple(skipped)

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> NF4Quant:
        stated = config or {}
        size = stated.get("group_size", 64)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"group_size is {size!r}; need: a positive integer")
        skipped = stated.get("modules_to_not_convert") or []
        if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
            raise ValueError(f"modules_to_not_convert is {skipped!r}; need: a list of names")
        return cls(size, skipped)

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        if not {"codes", "scales"} & tensors.keys():
            return None
        scales, wanted = tensors.get("scales"), -(-spec.in_features // self.group_size)
        if scales is not None and len(scales.shape) == 2 and scales.shape[1] != wanted:
            raise ValueError(
                f"group_size {self.group_size} in the config means {wanted} scales for {spec.in_features} inputs, the "
                f"file has {scales.shape[1]}"
            )
        return NF4Scheme(self.group_size)

    def expected(self, spec: LinearSpec) -> Mapping[str, TensorInfo] | None:
        return None if spec.name in self.skipped else headers_of(NF4Scheme(self.group_size), spec)

    def dummy(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo], random: RandomTensors
    ) -> dict[str, torch.Tensor]:
        made = {"codes": random.bits(tensors["codes"]), "scales": random.uniform(tensors["scales"], 0.03, 0.05)}
        return made | {n: random.uniform(t, -0.02, 0.02) for n, t in tensors.items() if n == "bias"}

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        """Options: group_size (default 64)."""
        return NF4Quantizer(**options)
