"""16-bit (or float32) linears as every unquantised checkpoint stores them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from qengine.plugin import (
    Capability,
    DeviceInfo,
    ExpertsOp,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    TensorInfo,
    TensorNeed,
    WeightQuant,
    WeightSample,
)
from qengine_kernels.cpu_linear import (
    DenseCpuLinear,
    FewRowsCpuLinear,
    Way,
    few_rows_bytes,
    runs_few_rows,
    tuning,
)

FLOATS = ("F16", "BF16", "F32", "F64")


class DenseCudaOp(LinearOp):
    """torch's linear (cuBLAS) on a CUDA device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.kernel = f"{str(weight.dtype).removeprefix('torch.')} cuBLAS"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32 or not multiplies_to_float32(x.device, x.dtype):
            return self(x).float()
        y = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return y if self.bias is None else y + self.bias

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})


@functools.cache
def multiplies_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies 16-bit matrices to float32 there: not every device and version does."""
    a = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        return torch.mm(a, a, out_dtype=torch.float32).dtype is torch.float32
    except (RuntimeError, TypeError):
        return False


class DenseCpuOp(LinearOp):
    """The fastest dense GEMM of this CPU, perhaps beside an 8-bit copy; see `qengine_kernels.cpu_linear`."""

    def __init__(self, linear: DenseCpuLinear | FewRowsCpuLinear) -> None:
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = linear.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers()


class DenseScheme(LinearScheme):
    """weight [out, in] and perhaps bias [out], converted to the compute dtype. `small`: never more bytes than that,
    even where this CPU multiplies float32 copies faster. `int8_rows`: on a CPU, an 8-bit copy multiplies up to so many
    rows (0: there is no copy)."""

    def __init__(self, small: bool = False, int8_rows: int = 0) -> None:
        self.small, self.int8_rows = small, int8_rows

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"16-bit with an int8 copy per channel for up to {self.int8_rows} rows" if self.int8_rows else "16-bit"

    @property
    def key(self) -> tuple[Any, ...]:
        return ("dense", self.small, self.int8_rows)

    def way(self) -> Way:
        """How a CPU multiplies bfloat16."""
        fastest = tuning().dense
        return "plain" if self.small and fastest == "float32" else fastest

    def compact(self) -> DenseScheme | None:
        return DenseScheme(small=True) if self.way() == "float32" or self.int8_rows else None

    def few_rows(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> DenseScheme | None:
        if device.type != "cpu" or not runs_few_rows(spec.in_features, dtype, tuning().int8_limit):
            return None
        return DenseScheme(self.small, tuning().int8_limit)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        weight = TensorNeed("weight", (spec.out_features, spec.in_features), FLOATS, output_dim=0, input_dim=1)
        bias = TensorNeed("bias", (spec.out_features,), FLOATS, output_dim=0)
        return [weight, bias] if spec.bias else [weight]

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        if device.type == "cuda":
            return (spec.in_features + spec.bias) * spec.out_features * dtype.itemsize
        return few_rows_bytes(
            spec.out_features, spec.in_features, spec.bias, dtype, limit=self.int8_rows, preferred=self.way()
        )

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cuda" and device.sm < 75:
            return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
        if device.type == "cuda" and device.sm < 80 and dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        return Capability.native()

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        weight = join([s.tensors.pop("weight") for s in shards])
        bias = join([s.tensors.pop("bias") for s in shards]) if shards[0].spec.bias else None
        if info.type == "cpu":
            if self.int8_rows:
                return DenseCpuOp(
                    FewRowsCpuLinear(weight, bias, dtype, limit=self.int8_rows, preferred=self.way())
                )
            return DenseCpuOp(DenseCpuLinear(weight, bias, dtype, self.way()))
        weight = weight.to(device, dtype)
        return DenseCudaOp(weight, None if bias is None else bias.to(device, dtype))

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_dense.experts import DenseCudaExperts

        return DenseCudaExperts(spec, count, device, dtype)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].to(torch.float32)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Stack shards along their outputs."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class DenseQuant(WeightQuant):
    """Reads every linear that has a float `weight`."""

    name = "dense"
    contract = 1
    methods = ("dense",)

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> DenseQuant:
        return cls()

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        """None without a `weight`. A weight of another dtype or shape is left to the accounting, which names it."""
        return DenseScheme() if "weight" in tensors else None

    @classmethod
    def with_kv_scales(cls, config: Mapping[str, Any] | None, granularity: str) -> dict[str, Any] | None:
        """compressed-tensors' config without any weight group: what llm-compressor writes for 16-bit weights."""
        strategies = {"tensor": "tensor", "head": "attn_head"}
        scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        return {
            "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed",
            "config_groups": {}, "ignore": [], "kv_cache_scheme": {**scheme, "strategy": strategies[granularity]},
        }  # fmt: skip

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """One of each dtype that files hold, and one with a bias."""
        generator = torch.Generator().manual_seed(0)
        found = []
        for dtype, bias in ((torch.bfloat16, False), (torch.float16, True), (torch.float32, False)):
            spec = LinearSpec("model.layers.0.mlp.up_proj", 80, 48, bias)
            tensors = {"weight": torch.randn(48, 80, generator=generator).to(dtype)}
            if bias:
                tensors["bias"] = torch.randn(48, generator=generator).to(dtype)
            found.append(WeightSample(None, spec, tensors))
        return found
