"""Calibrates one decoder layer: statistics, factors, quantised tensors, KV scales, and what all of it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.layers.feeds import Feed
from qengine.layers.linear import Linear
from qengine.layers.moe import ExpertLinear
from qengine.models.blocks import DecoderLayer
from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec, Quantizer, TensorInfo, WeightQuant
from qengine.runtime.quant_config import QuantConfig
from qengine.runtime.quant_select import select_quant
from qengine.runtime.safetensors_file import CODES
from qengine_calibration.fold import LayerWeights, can_fold, fold, specs_of
from qengine_calibration.observe import InputObserver, Seen

COLD_TOKENS = 32
"""A linear that saw fewer (an expert that is rarely chosen) is quantised without statistics of its own."""


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
    """Weights by name as the layer has them now, float, where a second run through it loads them."""


class LayerQuantizer:
    """Quantises layers by one plugin's quantizer, with statistics where it takes them."""

    def __init__(self, quantizer: Quantizer, plugin: type[WeightQuant]) -> None:
        self.quantizer = quantizer
        self.reader = reader_of(quantizer, plugin)

    @property
    def calibrated(self) -> CalibratedQuantizer | None:
        return self.quantizer if isinstance(self.quantizer, CalibratedQuantizer) else None

    @property
    def wants_moment(self) -> bool:
        return self.calibrated is not None and self.calibrated.wants_moment

    def chosen(self, leaves: Sequence[Any]) -> dict[str, LinearSpec]:
        """The linears that will be quantised, by name."""
        specs = [s for leaf in leaves if isinstance(leaf, Linear) and leaf.quantizable for s in leaf.specs]
        return {s.name: s for s in specs if self.quantizer.accepts(s) is None}

    def observed(self, layer: DecoderLayer) -> list[Linear]:
        """The leaves whose inputs have to be looked at: those with a chosen linear, and the first reader of each
        vector that factors can be taken out of, which sees all tokens."""
        chosen = self.chosen(layer.leaves)
        first = [f.readers[0] for f in layer.feeds() if can_fold(f, list(chosen))] if self.calibrated else []
        own = [leaf for leaf in layer.leaves if isinstance(leaf, Linear) and any(s.name in chosen for s in leaf.specs)]
        return list({leaf.name: leaf for leaf in [*first, *own]}.values())

    @torch.inference_mode()
    def run(
        self, layer: DecoderLayer, tensors: dict[str, torch.Tensor], observers: dict[str, InputObserver],
        keep_meaning: bool = False,
    ) -> LayerResult:
        """`tensors` are the layer's float tensors by name, on the device where the work is done. Empties both dicts.
        With `keep_meaning` the result holds the layer's new weights as floats."""
        out = LayerResult()
        weights = LayerWeights(tensors)
        chosen = self.chosen(layer.leaves)
        seen = {name: observers.pop(name).seen() for name in list(observers)}
        if self.calibrated is not None:
            for feed in layer.feeds():
                self._fold(self.calibrated, feed, chosen, weights, seen, out)
        for leaf in layer.leaves:
            if not isinstance(leaf, Linear):
                continue
            for spec in leaf.specs:
                if spec.name in chosen:
                    meaning = self._quantize(spec, leaf, weights.values.pop(f"{spec.name}.weight"), seen, out)
                    if keep_meaning:
                        out.meaning[f"{spec.name}.weight"] = meaning
        for name, value in weights.values.items():
            if name in weights.changed:
                out.tensors[name] = weights.stored(name)
                out.replaced[name] = [name]
            if keep_meaning:
                out.meaning[name] = out.tensors.get(name, value)
        return out

    def _fold(
        self, quantizer: CalibratedQuantizer, feed: Feed, chosen: Mapping[str, LinearSpec], weights: LayerWeights,
        seen: dict[str, Seen | None], out: LayerResult,
    ) -> None:
        first = seen.get(feed.readers[0].name)
        if first is None or first.stats.tokens < COLD_TOKENS or not can_fold(feed, list(chosen)):
            return
        readers = [(s, weights.values[f"{s.name}.weight"]) for s in specs_of(feed) if s.name in chosen]
        channels = None if feed.channels is None else feed.channels.to(first.stats.amax.device)
        factors = quantizer.input_factors(readers, first.stats, channels)
        if factors is None:
            return
        if not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise ValueError(f"{readers[0][0].name}: the quantizer chose factors that are not finite and positive")
        factors = fold(feed, factors, weights)
        for leaf in feed.readers:
            own = seen.get(leaf.name)
            if own is not None:
                seen[leaf.name] = own.divided(factors)
        out.factors[feed.readers[0].name] = {"least": float(factors.min()), "most": float(factors.max())}

    def _quantize(
        self, spec: LinearSpec, leaf: Linear, weight: torch.Tensor, seen: Mapping[str, Seen | None], out: LayerResult
    ) -> torch.Tensor:
        """Returns what the new tensors mean, float32 [out, in]."""
        own = seen.get(leaf.name)
        tokens = 0 if own is None else own.stats.tokens
        if self.calibrated is None:
            made = self.quantizer.quantize(spec, weight)
        elif own is None or tokens < COLD_TOKENS:
            out.cold[spec.name] = tokens
            made = self.calibrated.quantize_cold(spec, weight, relatives(leaf, seen))
        else:
            made = self.calibrated.quantize_calibrated(spec, weight, own.stats)
        infos = {leaf: TensorInfo(leaf, CODES[t.dtype], tuple(t.shape)) for leaf, t in made.items()}
        scheme = self.reader.scheme_for(spec, infos)
        if scheme is None:
            raise ValueError(f"{spec.name}: the plugin does not read what its own quantizer made")
        meaning = scheme.dequantize(spec, made).to(weight.device)
        out.linears[spec.name] = {"tokens": tokens, **errors(weight, meaning, own)}
        names = {leaf: f"{spec.name}.{leaf}" for leaf in made}
        out.tensors |= {names[leaf]: t for leaf, t in made.items()}
        out.replaced[f"{spec.name}.weight"] = list(names.values())
        return meaning


def reader_of(quantizer: Quantizer, plugin: type[WeightQuant]) -> WeightQuant:
    """What reads the quantizer's files: its own plugin, or that of the method which its config names."""
    config = quantizer.config([])
    method = config.get("quant_method")
    if method is None or method in (plugin.name, *plugin.methods):
        return plugin.parse(config)
    reader = select_quant(None, QuantConfig(method, config, f"the config of new {plugin.name} weights")).quant
    assert reader is not None
    return reader


def relatives(leaf: Linear, seen: Mapping[str, Seen | None]) -> InputStats | None:
    """Of the same linear of the other experts, the statistics of the one that saw the largest values."""
    if not isinstance(leaf, ExpertLinear):
        return None
    found = [seen.get(other.name) for other in leaf.group.leaves]
    warm = [s.stats for s in found if s is not None and s.stats.tokens >= COLD_TOKENS]
    return max(warm, key=lambda s: float(s.amax.max()), default=None)


def errors(weight: torch.Tensor, meaning: torch.Tensor, seen: Seen | None) -> dict[str, float]:
    """Relative errors (root of squared error by squared size) of the weight, and of the outputs where inputs are
    known."""
    difference = meaning - weight
    found = {"weight_error": float(difference.norm() / weight.norm().clamp_min(1e-30))}
    if seen is not None:
        found["output_error"] = (seen.output_power(difference) / max(seen.output_power(weight), 1e-30)) ** 0.5
    return found
