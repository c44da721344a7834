"""A weight format under test: its stored linears, and what becomes of them at each place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from qengine.conformance.kit import CheckFailed, need
from qengine.conformance.places import Place
from qengine.plugin import (
    KernelScheme,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    Quantizer,
    TensorInfo,
    WeightKernels,
    WeightQuant,
    WeightSample,
)
from qengine.plugin.discovery import load_plugin
from qengine.runtime.safetensors_file import CODES

PLAIN = LinearSpec("model.layers.0.self_attn.q_proj", 128, 64)
SPECS = (
    PLAIN,
    LinearSpec("model.layers.0.self_attn.k_proj", 128, 32, bias=True),
    LinearSpec("model.layers.0.mlp.down_proj", 192, 40),
    LinearSpec("model.layers.0.mlp.up_proj", 100, 24),
    LinearSpec("model.layers.0.mlp.gate_proj", 72, 7, bias=True),
    LinearSpec("model.layers.0.self_attn.o_proj", 33, 8),
)
"""Even ones and odd ones: inputs that are no multiple of a group, of a word or of two, outputs that are odd."""
GROUP_SIZE = 32
"""Asked for beside the default where the quantizer has groups, so that small shapes have several."""


def weight_of(spec: LinearSpec, seed: int = 0) -> torch.Tensor:
    """float32 [out, in]: normal rows, and one each of zeros, of equal values, of one sign and with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(spec.out_features, spec.in_features, generator=generator) * 0.05
    for row, values in enumerate((torch.zeros(()), torch.full((), 0.03), w[2].abs())):
        w[row] = values
    w[3, spec.in_features // 2] = 1.5
    return w


@dataclass(frozen=True)
class Stored:
    """One linear as a file holds it; `scheme` is what the plugin makes of its headers."""

    plugin: type[WeightQuant]
    config: Mapping[str, Any] | None
    spec: LinearSpec
    tensors: Mapping[str, torch.Tensor]
    made: bool
    """By the plugin's quantizer, from `weight_of(spec)`."""
    kernels: type[WeightKernels] | None = None
    """Run by these instead of the format's own."""

    def __str__(self) -> str:
        s = self.spec
        return f"{s.in_features} -> {s.out_features}{' with bias' if s.bias else ''}"

    @cached_property
    def headers(self) -> dict[str, TensorInfo]:
        return {
            leaf: TensorInfo(f"{self.spec.name}.{leaf}", CODES[t.dtype], tuple(t.shape))
            for leaf, t in self.tensors.items()
        }

    @cached_property
    def scheme(self) -> LinearScheme:
        scheme = self.plugin.parse(self.config).scheme_for(self.spec, self.headers)
        if scheme is None:
            raise CheckFailed(f"scheme_for says None to its own tensors ({', '.join(self.headers)})")
        return scheme if self.kernels is None else self.kernels().scheme(scheme, self.spec) or scheme

    @property
    def known(self) -> bool:
        """Whether the kernels under test, if there are any, know this linear."""
        return self.kernels is None or isinstance(self.scheme, KernelScheme)

    @cached_property
    def weight(self) -> torch.Tensor:
        """What the plugin says the tensors mean: float32 [out, in]."""
        w = self.scheme.dequantize(self.spec, self.copied())
        shape = (self.spec.out_features, self.spec.in_features)
        need(tuple(w.shape) == shape and w.dtype is torch.float32, f"dequantize gives {w.dtype} {tuple(w.shape)}, "
             f"need float32 {shape}")  # fmt: skip
        return w

    def copied(self) -> dict[str, torch.Tensor]:
        return {leaf: t.clone() for leaf, t in self.tensors.items()}

    def changed(self, **tensors: torch.Tensor) -> Stored:
        return replace(self, tensors={**self.tensors, **tensors}, made=False)

    def runs_at(self, place: Place, dtype: torch.dtype) -> bool:
        return bool(self.scheme.capability(place.info, dtype))

    def bind(self, place: Place, dtype: torch.dtype) -> LinearOp:
        return bind([self], place, dtype)


def bind(parts: Sequence[Stored], place: Place, dtype: torch.dtype) -> LinearOp:
    """One op over all parts, which keep their tensors."""
    shards = [LinearShard(part.spec, part.copied()) for part in parts]
    return parts[0].scheme.bind(shards, place.device, place.info, dtype)


class WeightSubject:
    """What the checks of a weight format, or of other kernels for one, ask about.

    `samples` are stored linears beside those that the plugin's quantizer makes and those of its `samples` hook;
    `targets` the compute capabilities to compile for (None: all that Triton knows here).
    """

    kind = "weight"

    def __init__(
        self,
        plugin: type[WeightQuant],
        places: Sequence[Place],
        samples: Sequence[WeightSample] = (),
        targets: Sequence[int] | None = None,
        kernels: type[WeightKernels] | None = None,
    ) -> None:
        self.plugin, self.places, self.targets, self.kernels = plugin, places, targets, kernels
        self.extra = samples

    @cached_property
    def quantizers(self) -> list[Quantizer]:
        first = self.plugin.quantizer()
        if first is None:
            return []
        grouped = "group_size" in inspect.signature(type(first)).parameters
        other = self.plugin.quantizer(group_size=GROUP_SIZE) if grouped else None
        return [first] if other is None else [first, other]

    @cached_property
    def stored(self) -> list[Stored]:
        """Every stored linear, from all sources."""
        found = [made for quantizer in self.quantizers for made in self._made(quantizer)]
        samples = [*self.plugin.samples(), *self.extra]
        found += [Stored(self.plugin, s.config, s.spec, s.tensors, False, self.kernels) for s in samples]
        found = [own for own in found if own.known]
        need(bool(found), "nothing to check: the format has no quantizer and no samples (see WeightQuant.samples)")
        return found

    def reader(self, config: Mapping[str, Any]) -> type[WeightQuant]:
        """The plugin itself, or the installed one whose files its quantizer writes."""
        method = config.get("quant_method")
        own = {self.plugin.name, *self.plugin.methods}
        return self.plugin if method in own or not isinstance(method, str) else load_plugin("weight", method)

    def _made(self, quantizer: Quantizer) -> Iterator[Stored]:
        config = quantizer.config([])
        reader = self.reader(config)
        for spec in SPECS:
            if quantizer.accepts(spec) is None:
                tensors = dict(quantizer.quantize(spec, weight_of(spec)))
                if spec.bias and "bias" not in tensors:
                    tensors["bias"] = bias_of(spec)
                yield Stored(reader, config, spec, tensors, True, self.kernels)

    def runs(self, stored: Sequence[Stored] | None = None) -> Iterator[tuple[Stored, Place, torch.dtype, float]]:
        """Every (stored linear, place, compute dtype, its error limit) that the format claims to run."""
        for own in self.stored if stored is None else stored:
            for place in self.places:
                for dtype, limit in place.limits:
                    if own.runs_at(place, dtype):
                        yield own, place, dtype, limit


def bias_of(spec: LinearSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(spec.out_features)
    return torch.randn(spec.out_features, generator=generator).to(torch.float16)


def inputs(rows: int, spec: LinearSpec, dtype: torch.dtype, place: Place, seed: int = 1) -> torch.Tensor:
    """[rows, in] normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.in_features, generator=generator).to(dtype).to(place.device)
