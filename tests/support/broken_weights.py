"""Weight formats that are wrong in one way each, made from AWQ's and GPTQ's plugins, to test the conformance kit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from qengine.plugin import (
    Capability,
    DeviceInfo,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    Quantizer,
    TensorInfo,
    TensorNeed,
    WeightQuant,
)
from qengine_awq.backend import AwqQuant, AwqScheme
from qengine_awq.kernels import AwqCudaLinear
from qengine_gptq.backend import GptqQuant, GptqScheme
from qengine_kernels.wna16_gemm import wna16_matmul


@triton.jit
def reversed_nibble(words, SLOT: tl.constexpr):
    return (words >> (4 * (7 - SLOT))) & 0xF


@triton.jit
def cast_through_fp8(p_x, p_y, SIZE: tl.constexpr):
    """A cast that sm_75 does not have."""
    o_x = tl.arange(0, SIZE)
    tl.store(p_y + o_x, tl.load(p_x + o_x).to(tl.float8e4nv).to(tl.float16))


class WithUnpack(LinearOp):
    """An AWQ linear for CUDA with another device function."""

    def __init__(self, op: AwqCudaLinear, unpack: Any) -> None:
        self.op, self.unpack = op, unpack
        self.in_features, self.out_features, self.kernel = op.in_features, op.out_features, op.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return wna16_matmul(x, self.op.weight, self.op.bias, self.unpack, self.op.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.op.buffers()


class Wrapped(LinearOp):
    """An op around another; subclasses break it."""

    def __init__(self, op: LinearOp) -> None:
        self.op = op
        self.in_features, self.out_features, self.kernel = op.in_features, op.out_features, op.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.op.buffers()


class BrokenScheme(AwqScheme):
    """`AwqScheme` whose `bind` goes through `broken`."""

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        return self.broken(super().bind(shards, device, info, dtype))

    def broken(self, op: LinearOp) -> LinearOp:
        return op


class Broken(AwqQuant):
    """Reads AWQ as `scheme` does."""

    scheme: ClassVar[type[AwqScheme]] = BrokenScheme

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        good = super().scheme_for(spec, tensors)
        if not isinstance(good, AwqScheme):
            return good
        return self.scheme(**{f.name: getattr(good, f.name) for f in dataclasses.fields(good)})


class WrongNibbleOrder(Broken):
    class scheme(BrokenScheme):
        def broken(self, op: LinearOp) -> LinearOp:
            return WithUnpack(op, reversed_nibble) if isinstance(op, AwqCudaLinear) else op


class InvertedScale(Broken):
    class scheme(BrokenScheme):
        def bind(self, shards: Sequence[LinearShard], *rest: Any) -> LinearOp:
            for shard in shards:
                shard.tensors["scales"] = 1 / shard.tensors["scales"].clamp_min(1e-3)
            return super().bind(shards, *rest)


class ZeroOffByOne(Broken):
    """The first line of GPTQ's file format: stored zeros are one less."""

    class scheme(BrokenScheme):
        def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            scales = tensors["scales"].float()
            size = spec.in_features if self.group_size == -1 else self.group_size
            return super().dequantize(spec, tensors) - scales.repeat_interleave(size, 0)[: spec.in_features].t()


class LosesTheLastInput(Broken):
    """Right but for the last input, which an even loop leaves out."""

    class scheme(BrokenScheme):
        class Op(Wrapped):
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return self.op(torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], dim=1))

        def broken(self, op: LinearOp) -> LinearOp:
            return self.Op(op)


class ChangesItsInput(Broken):
    class scheme(BrokenScheme):
        class Op(Wrapped):
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                y = self.op(x)
                x.zero_()
                return y

        def broken(self, op: LinearOp) -> LinearOp:
            return self.Op(op)


class LiesAboutBytes(Broken):
    class scheme(BrokenScheme):
        def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
            return spec.in_features * spec.out_features // 2  # scales and zeros forgotten


class HidesADenseCopy(Broken):
    class scheme(BrokenScheme):
        class Op(Wrapped):
            def __init__(self, op: LinearOp) -> None:
                super().__init__(op)
                self.dense = op(torch.eye(op.in_features)).T.contiguous()

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.dense.T.to(x.dtype)

        def broken(self, op: LinearOp) -> LinearOp:
            return self.Op(op)


class KeepsAView(Broken):
    """Multiplies by a view that was made when it was bound."""

    class scheme(BrokenScheme):
        class Op(Wrapped):
            def __init__(self, op: LinearOp) -> None:
                super().__init__(op)
                self.weight = torch.randn(op.out_features, op.in_features)
                self.view = self.weight.t()

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.view.to(x.dtype)

            def buffers(self) -> dict[str, torch.Tensor]:
                return {"weight": self.weight}

        def broken(self, op: LinearOp) -> LinearOp:
            return self.Op(op)


class NotDeterministic(Broken):
    class scheme(BrokenScheme):
        class Op(Wrapped):
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return self.op(x) * (1 + 1e-3 * torch.rand(()))

        def broken(self, op: LinearOp) -> LinearOp:
            return self.Op(op)


class FusesTheFirstOnly(Broken):
    """Scales of every shard are taken from the first."""

    class scheme(BrokenScheme):
        def bind(self, shards: Sequence[LinearShard], *rest: Any) -> LinearOp:
            for shard in shards:
                shard.tensors["qweight"] = shards[0].tensors["qweight"].clone()
            return super().bind(shards, *rest)


class ClaimsWhatDoesNotCompile(Broken):
    class scheme(BrokenScheme):
        class Op(Wrapped):
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                y = torch.empty(len(x), self.out_features, dtype=x.dtype)
                cast_through_fp8[(1,)](x, y, SIZE=16)
                return y

        def broken(self, op: LinearOp) -> LinearOp:
            return self.Op(op)


class ClaimsBfloat16OnTuring(Broken):
    class scheme(BrokenScheme):
        def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
            return Capability.native()


class RefusesSilently(Broken):
    class scheme(BrokenScheme):
        def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
            return Capability.native() if device.type == "cpu" else Capability.refused("")


class TakesNaNScales(Broken):
    class scheme(BrokenScheme):
        def bind(self, shards: Sequence[LinearShard], *rest: Any) -> LinearOp:
            for shard in shards:
                shard.tensors["scales"] = shard.tensors["scales"].nan_to_num(0.0, 0.0, 0.0)
            return super().bind(shards, *rest)


class ForgetsATensor(Broken):
    class scheme(BrokenScheme):
        def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
            return [n for n in super().tensors(spec) if n.leaf != "qzeros"]


class SplitsTheWrongWay(Broken):
    class scheme(BrokenScheme):
        def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
            turned = []
            for n in super().tensors(spec):
                swap = n.leaf == "qweight"
                turned.append(dataclasses.replace(n, output_dim=n.input_dim, input_dim=n.output_dim) if swap else n)
            return turned


class InheritsNoVersion(WeightQuant):
    name = "silent"

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> WeightQuant:
        return cls()

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        return None


class BrokenQuantizer(Quantizer):
    """AWQ's with `broken` applied to its tensors."""

    def __init__(self, good: Quantizer) -> None:
        self.good = good

    def accepts(self, spec: LinearSpec) -> str | None:
        return self.good.accepts(spec)

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        return self.good.config(skipped)

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.good.quantize(spec, weight)


class ScalesTwiceTooLarge(AwqQuant):
    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        class Wrong(BrokenQuantizer):
            def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
                made = self.good.quantize(spec, weight)
                return made | {"scales": made["scales"] * 2}

        good = AwqQuant.quantizer(group_size=32)
        return None if good is None else Wrong(good)


class QuantizesNaN(AwqQuant):
    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        class Wrong(BrokenQuantizer):
            def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
                return self.good.quantize(spec, weight.nan_to_num())

        good = AwqQuant.quantizer(group_size=32)
        return None if good is None else Wrong(good)


class MisnamesItsMethod(AwqQuant):
    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        class Wrong(BrokenQuantizer):
            def config(self, skipped: Sequence[str]) -> dict[str, Any]:
                return self.good.config(skipped) | {"quant_method": "another"}

        good = AwqQuant.quantizer(group_size=32)
        return None if good is None else Wrong(good)


class IgnoresGroupIndex(GptqQuant):
    """Reads act-order files as if their inputs were sorted."""

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        good = super().scheme_for(spec, tensors)
        assert isinstance(good, GptqScheme)

        class Scheme(GptqScheme):
            def bind(self, shards: Sequence[LinearShard], *rest: Any) -> LinearOp:
                for shard in shards:
                    if "g_idx" in shard.tensors:
                        shard.tensors["g_idx"] = shard.tensors["g_idx"].sort().values
                return super().bind(shards, *rest)

        return Scheme(**{f.name: getattr(good, f.name) for f in dataclasses.fields(good)})
