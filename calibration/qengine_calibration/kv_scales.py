"""KV scales of a whole model, and the small file beside it that `serve` picks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qengine.errors import ConfigError
from qengine.plugin import KVDtype
from qengine_calibration.kv_methods import GRANULARITIES, METHODS, Scaled, attention_error, choose
from qengine_calibration.observe import KVObserver

MOST_DAMAGE = 0.2
"""Relative error of a layer's attention output above which it keeps 16 bits. Sound layers lie below: at most 0.08 with
e4m3 and 0.17 with e5m2 on the demo model. Keys whose offset dwarfs what tells them apart lie above."""
SIXTEEN_BIT = "auto"


@dataclass(frozen=True)
class KVOptions:
    """What `qengine calibrate --kv-dtype` was asked for. `most_damage`: layers whose attention output would be further
    off keep a 16-bit cache."""

    plugin: type[KVDtype]
    granularity: str = "head"
    method: str = "mse"
    most_damage: float = MOST_DAMAGE

    def __post_init__(self) -> None:
        if self.plugin.max_value is None:
            raise ConfigError(f"KV dtype {self.plugin.name} takes no scales, so there is nothing to calibrate")
        if self.method not in METHODS:
            raise ConfigError("--method", have=self.method, need=" | ".join(METHODS))
        if not self.most_damage > 0:
            raise ConfigError("--max-kv-damage makes no sense", have=self.most_damage, need="> 0")
        if self.granularity not in GRANULARITIES:
            raise ConfigError("--kv-granularity", have=self.granularity, need=" | ".join(GRANULARITIES))
        if self.granularity not in self.plugin.scale_granularity:
            raise ConfigError(
                f"KV dtype {self.plugin.name} does not take one scale per {self.granularity}",
                need=" | ".join(self.plugin.scale_granularity),
            )


@dataclass
class KVLayerResult:
    """Scales of one attention layer and figures about them."""

    name: str
    k: Scaled
    v: Scaled
    tokens: int
    attention_error: float
    unscaled_error: float
    """The same at scale 1.0."""

    def facts(self) -> dict[str, Any]:
        def half(s: Scaled) -> dict[str, Any]:
            return {
                "scale": s.scale.tolist(), "amax": s.amax.tolist(), "clip_rate": s.clip_rate,
                "relative_error": s.relative_error, "only_zeros": s.silent,
            }  # fmt: skip

        return {
            "k": half(self.k), "v": half(self.v), "tokens": self.tokens,
            "attention_output_error": self.attention_error,
            "attention_output_error_at_scale_1": self.unscaled_error,
        }  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names that checkpoints use."""
        return {f"{self.name}.k_scale": self.k.scale, f"{self.name}.v_scale": self.v.scale}


def settle(name: str, seen: KVObserver, options: KVOptions) -> KVLayerResult:
    pair = (options.plugin(seen.spec, "k", torch.float32), options.plugin(seen.spec, "v", torch.float32))
    k = choose(seen.k, pair[0], options.method, options.granularity, f"the keys of {name}")
    v = choose(seen.v, pair[1], options.method, options.granularity, f"the values of {name}")
    one = torch.ones(1)
    return KVLayerResult(
        name, k, v, seen.tokens, attention_error(seen, pair, k.scale, v.scale), attention_error(seen, pair, one, one)
    )  # fmt: skip
