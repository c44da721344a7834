"""Runs AWQ linears on the CUDA extension of `autoawq-kernels` (module `awq_ext`), where that loads."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from qengine.plugin import (
    Capability,
    DeviceInfo,
    KernelScheme,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    WeightKernels,
)

SPLIT_K = 8
"""Parts of K that the extension's GEMM adds up, as AutoAWQ calls it."""
MOST_ROWS = 256
"""Above so many rows the weight is decoded once for a library GEMM."""
FUNCTIONS = ("gemm_forward_cuda", "dequantize_weights_cuda")


@functools.cache
def extension() -> tuple[Any, str]:
    """The module, or None and why it does not load: it is missing, or built for another torch or CUDA."""
    try:
        module = importlib.import_module("awq_ext")
    except (ImportError, OSError) as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        return None, f"autoawq-kernels does not load: {first}"
    missing = [name for name in FUNCTIONS if not hasattr(module, name)]
    return (None, f"awq_ext has no {', '.join(missing)}") if missing else (module, "")


class AutoAwqKernels(WeightKernels):
    """Takes AWQ's gemm layout with zero points in whole groups; leaves everything else to the format's own kernels."""

    name = "autoawq"
    contract = "1.0"
    priority = 10

    def scheme(self, base: LinearScheme, spec: LinearSpec) -> KernelScheme | None:
        k, n = spec.in_features, spec.out_features
        group = base.inputs_per_scale(spec)
        if group is None or k % group or n % 8:
            return None
        gemm = {"qweight": (k, n // 8), "qzeros": (k // group, n // 8), "scales": (k // group, n)}
        shapes = {need.leaf: need.shape for need in base.tensors(spec) if need.leaf != "bias"}
        return AutoAwqScheme(base) if shapes == gemm else None


class AutoAwqScheme(KernelScheme):
    """AWQ as the extension reads it: the file's own words, nothing repacked."""

    label = "autoawq"

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type != "cuda":
            return Capability.refused("the extension runs on NVIDIA GPUs")
        if device.sm < 75:
            return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
        if dtype is not torch.float16:
            return Capability.refused(f"float16 only, not {str(dtype).removeprefix('torch.')}; --dtype half works")
        module, reason = extension()
        return Capability.native("CUDA extension of autoawq-kernels") if module else Capability.refused(reason)

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        kept = sum(4 * shape[0] * shape[1] for leaf, shape in self._shapes(spec) if leaf in ("qweight", "qzeros"))
        groups = next(shape[0] for leaf, shape in self._shapes(spec) if leaf == "scales")
        return kept + 2 * groups * spec.out_features + spec.bias * spec.out_features * dtype.itemsize

    def _shapes(self, spec: LinearSpec) -> list[tuple[str, tuple[int, ...]]]:
        return [(n.leaf, tuple(size or 0 for size in n.shape)) for n in self.tensors(spec)]

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        for shard in shards:
            if not torch.isfinite(shard.tensors["scales"]).all():
                raise ValueError(f"{shard.spec.name}: scales are not finite")

        def taken(leaf: str, dim: int) -> torch.Tensor:
            return torch.cat([s.tensors.pop(leaf) for s in shards], dim=dim).to(device)

        bias = taken("bias", 0).to(dtype) if shards[0].spec.bias else None
        return AutoAwqOp(taken("qweight", 1), taken("qzeros", 1), taken("scales", 1).half(), bias)


class AutoAwqOp(LinearOp):
    """qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales float16 [G, N], bias [N] or None."""

    def __init__(
        self, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.qweight, self.qzeros, self.scales, self.bias = qweight, qzeros, scales, bias
        self.in_features, self.out_features = qweight.shape[0], scales.shape[1]
        self.kernel = f"autoawq-kernels GEMM, decode + cuBLAS above {MOST_ROWS} rows"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module, _ = extension()
        if len(x) > MOST_ROWS:
            weight = module.dequantize_weights_cuda(self.qweight, self.scales, self.qzeros, 0, 0, 0, False)
            y = x @ weight
        else:
            y = module.gemm_forward_cuda(x.contiguous(), self.qweight, self.scales, self.qzeros, SPLIT_K)
        return y if self.bias is None else y + self.bias

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {"qweight": self.qweight, "qzeros": self.qzeros, "scales": self.scales, "bias": self.bias}
        return {name: t for name, t in named.items() if t is not None}
