"""KV scales of a whole model: what is asked for, and what each layer gets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from qengine.errors import ConfigError
from qengine.plugin import AttentionSpec, KVDtype
from qengine.plugin.discovery import load_plugin
from qengine.runtime.kv_dtypes import Pair, asked_kv_dtypes, scaled_kv_dtypes
from qengine_calibration.attention_error import attention_error
from qengine_calibration.kv_methods import GRANULARITIES, METHODS, Scaled, choose
from qengine_calibration.observe import KVObserver

MOST_DAMAGE = 0.2
"""Relative error of a layer's attention output above which it keeps 16 bits. Sound layers lie below: at most 0.08 with
e4m3 and 0.17 with e5m2 on the demo model. Keys whose offset dwarfs what tells them apart lie above."""
SIXTEEN_BIT = "auto"


@dataclass(frozen=True)
class KVOptions:
    """What `qengine calibrate --kv-dtype` was asked for: `kv_dtype` as serving takes it, one name or a map of sides and
    layers. `most_damage`: layers whose attention output would be further off keep a 16-bit cache.

    Raises PluginError for dtypes that are not there, ConfigError where none of them takes scales.
    """

    kv_dtype: str
    granularity: str = "head"
    method: str = "output"
    most_damage: float = MOST_DAMAGE

    def __post_init__(self) -> None:
        scaled = self.scaled("k") | self.scaled("v")
        if not scaled:
            raise ConfigError(f"KV dtype {self.kv_dtype} takes no scales, so there is nothing to calibrate")
        if self.method not in METHODS:
            raise ConfigError("--method", have=self.method, need=" | ".join(METHODS))
        if not 0 < self.most_damage < math.inf:
            raise ConfigError("--max-kv-damage is no limit", have=self.most_damage, need="0 < x < inf, such as 1e9")
        if self.granularity not in GRANULARITIES:
            raise ConfigError("--kv-granularity", have=self.granularity, need=" | ".join(GRANULARITIES))
        for plugin in scaled:
            if self.granularity not in plugin.scale_granularity:
                raise ConfigError(
                    f"KV dtype {plugin.name} does not take one scale per {self.granularity}",
                    need=" | ".join(plugin.scale_granularity),
                )

    def check_layers(self, windowed: Iterable[bool]) -> None:
        """Raises ConfigError where a layer is named that the model, whose layers have a window or not, has not."""
        asked_kv_dtypes(self.kv_dtype).check(windowed)

    @property
    def plugins(self) -> list[type[KVDtype]]:
        """Every dtype that some side of a layer may get."""
        return [_kv_plugin(name) for name in asked_kv_dtypes(self.kv_dtype).dtypes]

    def scaled(self, side: str) -> set[type[KVDtype]]:
        """Dtypes with scales that this side of any layer may get."""
        return scaled_kv_dtypes(asked_kv_dtypes(self.kv_dtype), side)

    def pair(self, index: int, spec: AttentionSpec) -> Pair:
        """The dtypes of layer `index`."""
        asked = asked_kv_dtypes(self.kv_dtype)
        k, v = (asked.find(index, spec.sliding_window is not None, side).dtype for side in ("k", "v"))
        return _kv_plugin(k), _kv_plugin(v)


def _kv_plugin(name: str) -> type[KVDtype]:
    return load_plugin("kv", name)


@dataclass
class KVLayerResult:
    """Scales of one attention layer and figures about them; None for a side whose dtype takes none."""

    name: str
    seen: KVObserver
    dtypes: Pair
    k: Scaled | None
    v: Scaled | None
    attention_error: float
    unscaled_error: float
    """The same at scale 1.0."""

    def facts(self) -> dict[str, Any]:
        def half(side: str, plugin: type[KVDtype], s: Scaled | None) -> dict[str, Any]:
            found: dict[str, Any] = {"kv_dtype": plugin.name}
            if s is None:
                return found | {"amax": getattr(self.seen, side).amax.tolist()}
            return found | {
                "scale": s.scale.tolist(), "amax": s.amax.tolist(), "clip_rate": s.clip_rate,
                "relative_error": s.relative_error, "only_zeros": s.silent, "left_at_1": s.at_1,
            }  # fmt: skip

        return {
            "k": half("k", self.dtypes[0], self.k), "v": half("v", self.dtypes[1], self.v), "tokens": self.seen.tokens,
            "attention_output_error": self.attention_error,
            "attention_output_error_at_scale_1": self.unscaled_error,
        }  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names that checkpoints use."""
        return {f"{self.name}.{side}_scale": s.scale for side, s in (("k", self.k), ("v", self.v)) if s is not None}


def settle(name: str, index: int, seen: KVObserver, options: KVOptions) -> KVLayerResult:
    """The scales of layer `index`."""
    dtypes = options.pair(index, seen.spec)
    plugins = (dtypes[0](seen.spec, "k", torch.float32), dtypes[1](seen.spec, "v", torch.float32))

    def side(plugin: KVDtype, what: str) -> Scaled | None:
        if plugin.max_value is None:
            return None
        sizes = seen.k if plugin.side == "k" else seen.v
        return choose(sizes, seen.examples, plugin, options.method, options.granularity, f"the {what} of {name}")

    k, v = side(plugins[0], "keys"), side(plugins[1], "values")
    one = torch.ones(1)
    scales = [one if s is None else s.scale for s in (k, v)]
    error, unscaled = (attention_error(seen.examples, plugins, *pair) for pair in (scales, (one, one)))
    return KVLayerResult(name, seen, dtypes, k, v, error, unscaled)
