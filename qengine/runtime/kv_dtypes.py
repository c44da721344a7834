"""The KV dtypes of a model's layers: what --kv-dtype asks for, less what a calibration file excepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qengine.config import EngineConfig
from qengine.core.kv_map import KVMap, read_kv_map
from qengine.layers.attention import Attention
from qengine.plugin import KVDtype, KVLayout
from qengine.plugin.discovery import load_plugin
from qengine.runtime.kv_sidecar import KVSidecar

Pair = tuple[type[KVDtype], type[KVDtype]]
"""The plugins that store K and V."""


@dataclass(frozen=True)
class KVDtypes:
    """`sides` by attention name, for every layer in order; `notes` say what a calibration file changed."""

    sides: Mapping[str, Pair]
    notes: tuple[str, ...] = ()

    @classmethod
    def uniform(cls, layers: Iterable[Attention], plugin: type[KVDtype]) -> KVDtypes:
        return cls({layer.name: (plugin, plugin) for layer in layers})

    @property
    def name(self) -> str:
        """For people, and for the identity of cached blocks: the commonest pair, then the layers that differ."""
        places: dict[str, list[int]] = {}
        for i, pair in enumerate(self.sides.values()):
            places.setdefault(pair_name(pair), []).append(i)
        if not places:
            return "none"
        common = max(places, key=lambda name: len(places[name]))
        others = [f"{where(at)}: {name}" for name, at in places.items() if name != common]
        return "; ".join([common, *others])

    def formats(self, layer: Attention, dtype: torch.dtype) -> tuple[KVDtype, KVDtype]:
        """The plugins' instances for one layer."""
        k, v = self.sides[layer.name]
        return k(layer.spec, "k", dtype), v(layer.spec, "v", dtype)

    @property
    def scaled(self) -> set[type[KVDtype]]:
        """Plugins in it that take scales."""
        return {plugin for pair in self.sides.values() for plugin in pair if plugin.max_value is not None}


def pair_name(pair: Pair) -> str:
    k, v = (plugin.name for plugin in pair)
    return k if k == v else f"k={k}, v={v}"


def where(indices: Sequence[int]) -> str:
    """Ascending layer numbers such as "layers 0-2,7"."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layers {text}" if len(indices) > 1 else f"layer {text}"


def choose_kv_dtypes(asked: KVMap, layers: Sequence[Attention], sidecar: KVSidecar | None = None) -> KVDtypes:
    """The plugins of every layer. A calibration file that was measured for the dtype that a layer gets may name another
    one for that layer, because its damage was too great; an entry of `asked` that names the layer overrules it.

    Raises PluginError for dtypes that are not there, ConfigError for layers that are not.
    """
    asked.check([layer.spec.sliding_window is not None for layer in layers])
    sides: dict[str, Pair] = {}
    excepted: list[int] = []
    for i, layer in enumerate(layers):
        pair = []
        for side in ("k", "v"):
            entry = asked.find(i, layer.spec.sliding_window is not None, side)
            plugin = load_plugin("kv", entry.dtype)
            other = None
            if sidecar is not None and not entry.is_exception and sidecar.is_about(plugin):
                other = sidecar.exception(layer.name, side, plugin.name)
            if other is not None:
                plugin = load_plugin("kv", other)
                excepted.append(i)
            pair.append(plugin)
        sides[layer.name] = (pair[0], pair[1])
    notes = []
    if excepted:
        assert sidecar is not None
        numbers = sorted(set(excepted))
        names = sorted({pair_name(sides[layers[i].name]) for i in numbers})
        notes.append(f"KV dtype of {where(numbers)} is {' or '.join(names)}, as {sidecar.path} says")
    return KVDtypes(sides, tuple(notes))


def asked_kv_dtypes(kv_cache_dtype: str, skip: str | None = None) -> KVMap:
    """The options --kv-dtype and --kv-cache-dtype-skip-layers, read; every plugin that they name is loaded, so that an
    unknown one is refused before anything else is done."""
    asked = read_kv_map(kv_cache_dtype, EngineConfig.kv_cache_dtype, skip)
    for name in asked.dtypes:
        load_plugin("kv", name)
    return asked


def scaled_kv_dtypes(asked: KVMap, side: str) -> set[type[KVDtype]]:
    """Dtypes with scales that this side ("k" or "v") of any layer may get."""
    named = set(asked.dtypes)
    plugins = {load_plugin("kv", e.dtype) for e in asked.entries if e.dtype in named and e.side in (None, side)}
    return {plugin for plugin in plugins if plugin.max_value is not None}


def block_bytes_line(layouts: Sequence[KVLayout]) -> str:
    """Bytes of one token over all layers, and by layer where they differ."""
    by_size: dict[int, list[int]] = {}
    for i, layout in enumerate(layouts):
        by_size.setdefault(layout.block_bytes, []).append(i)
    size = layouts[0].block_size if layouts else 1
    total = sum(layout.block_bytes for layout in layouts) / size
    line = f"KV cache bytes for one token: {total:,.0f}"
    if len(by_size) > 1:
        line += " (" + ", ".join(f"{where(at)}: {n / size:,.0f} each" for n, at in by_size.items()) + ")"
    return line
