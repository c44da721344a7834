"""Calibrates one decoder layer: statistics, factors, quantised tensors, KV scales, and what all of it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.layers.feeds import Feed
from qengine.layers.linear import Linear
from qengine.models.blocks import DecoderLayer
from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec, Quantizer, TensorInfo, WeightQuant
from qengine.runtime.safetensors_file import CODES
from qengine_calibration.fold import LayerWeights, can_fold, fold, specs_of
from qengine_calibration.observe import InputObserver

COLD_TOKENS = 32
"""Of a linear that saw fewer (an expert that is rarely chosen), the weights alone decide."""


@dataclass
class LayerResult:
    """`tensors` go to the checkpoint instead of those that `replaced` names (old name -> new ones); `facts` are
    figures for reports, by linear."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    replaced: dict[str, list[str]] = field(default_factory=dict)
    linears: dict[str, dict[str, Any]] = field(default_factory=dict)
    factors: dict[str, dict[str, float]] = field(default_factory=dict)
    cold: dict[str, int] = field(default_factory=dict)
    """Linears that saw fewer than COLD_TOKENS tokens, and how many."""
    meaning: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights by name as the layer has them now, float: what a second run through it loads."""


class LayerQuantizer:
    """Quantises layers by one plugin's quantizer, with statistics where it takes them."""

    def __init__(self, quantizer: Quantizer, plugin: type[WeightQuant]) -> None:
        self.quantizer = quantizer
        self.reader = plugin.parse(quantizer.config([]))

    @property
    def calibrated(self) -> CalibratedQuantizer | None:
        return self.quantizer if isinstance(self.quantizer, CalibratedQuantizer) else None

    def chosen(self, leaves: Sequence[Any]) -> dict[str, LinearSpec]:
        """The linears that will be quantised, by name."""
        specs = [s for leaf in leaves if isinstance(leaf, Linear) and leaf.quantizable for s in leaf.specs]
        return {s.name: s for s in specs if self.quantizer.accepts(s) is None}

    def observed(self, layer: DecoderLayer) -> list[Linear]:
        """The leaves whose inputs have to be looked at: those with a chosen linear, and the first reader of each
        vector, which sees all tokens."""
        if self.calibrated is None:
            return []
        chosen = self.chosen(layer.leaves)
        first = [f.readers[0] for f in layer.feeds() if can_fold(f, list(chosen))]
        own = [leaf for leaf in layer.leaves if isinstance(leaf, Linear) and any(s.name in chosen for s in leaf.specs)]
        return list({leaf.name: leaf for leaf in [*first, *own]}.values())

    def run(
        self, layer: DecoderLayer, tensors: dict[str, torch.Tensor], observers: Mapping[str, InputObserver]
    ) -> LayerResult:
        """`tensors` are the layer's float tensors by name, on the device where the work is done."""
        out = LayerResult()
        weights = LayerWeights(tensors)
        chosen = self.chosen(layer.leaves)
        stats = {
            spec.name: observers[leaf.name].stats() for leaf in layer.leaves
            if isinstance(leaf, Linear) and leaf.name in observers for spec in leaf.specs
        }  # fmt: skip
        if self.calibrated is not None:
            for feed in layer.feeds():
                self._fold(self.calibrated, feed, chosen, weights, stats, out)
        for name, spec in chosen.items():
            self._quantize(spec, weights.values[f"{name}.weight"], stats.get(name), out)
        for name, value in weights.values.items():
            if name in weights.changed and name not in out.replaced:
                out.tensors[name] = weights.stored(name)
                out.replaced[name] = [name]
            if name not in out.meaning:
                out.meaning[name] = out.tensors.get(name, value)
        return out

    def _fold(
        self, quantizer: CalibratedQuantizer, feed: Feed, chosen: Mapping[str, LinearSpec], weights: LayerWeights,
        stats: dict[str, InputStats | None], out: LayerResult,
    ) -> None:
        seen = stats.get(feed.readers[0].specs[0].name)
        if seen is None or seen.tokens < COLD_TOKENS or not can_fold(feed, list(chosen)):
            return
        readers = [(s, weights.values[f"{s.name}.weight"]) for s in specs_of(feed) if s.name in chosen]
        channels = None if feed.channels is None else feed.channels.to(seen.amax.device)
        factors = quantizer.input_factors(readers, seen, channels)
        if factors is None:
            return
        if not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise ValueError(f"{readers[0][0].name}: the quantizer chose factors that are not finite and positive")
        factors = fold(feed, factors, weights)
        for spec in specs_of(feed):
            own = stats.get(spec.name)
            if own is not None:
                stats[spec.name] = own.divided(factors)
        out.factors[feed.readers[0].name] = {"least": float(factors.min()), "most": float(factors.max())}

    def _quantize(
        self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats | None, out: LayerResult
    ) -> None:
        tokens = 0 if stats is None else stats.tokens
        if self.calibrated is None:
            made = self.quantizer.quantize(spec, weight)
        elif stats is None or tokens < COLD_TOKENS:
            out.cold[spec.name] = tokens
            made = self.quantizer.quantize(spec, weight)
        else:
            made = self.calibrated.quantize_calibrated(spec, weight, stats)
        infos = {leaf: TensorInfo(leaf, CODES[t.dtype], tuple(t.shape)) for leaf, t in made.items()}
        scheme = self.reader.scheme_for(spec, infos)
        if scheme is None:
            raise ValueError(f"{spec.name}: the plugin does not read what its own quantizer made")
        meaning = scheme.dequantize(spec, made).to(weight.device)
        out.linears[spec.name] = {"tokens": tokens, **errors(weight, meaning, stats)}
        names = {leaf: f"{spec.name}.{leaf}" for leaf in made}
        out.tensors |= {names[leaf]: t for leaf, t in made.items()}
        out.replaced[f"{spec.name}.weight"] = list(names.values())
        out.meaning[f"{spec.name}.weight"] = meaning


def errors(weight: torch.Tensor, meaning: torch.Tensor, stats: InputStats | None) -> dict[str, float]:
    """Relative errors (root of squared error by squared size) of the weight, and of the outputs where inputs are
    known."""
    difference = meaning - weight
    found = {"weight_error": float(difference.norm() / weight.norm().clamp_min(1e-30))}
    if stats is not None and stats.moment is not None:
        power = stats.output_error(weight)
        found["output_error"] = (max(stats.output_error(difference), 0.0) / max(power, 1e-30)) ** 0.5
    return found
