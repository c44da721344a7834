"""From the magnitudes of keys and values to scales: three rules, and what each scale does to the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qengine.errors import CheckpointError
from qengine.plugin import AttentionSpec, KVDtype
from qengine.runtime.kv_scales import MIN_SCALE
from qengine_calibration.observe import KVObserver, Magnitudes, bin_centers, plain_attention

PERCENTILE = 0.9999
STEPS = torch.arange(-24, 17) / 8
"""Octaves around the scale of the largest value that `mse` tries."""
LEAST_SCALE = 2 * MIN_SCALE
"""Smaller ones would be refused when they are read."""
GRANULARITIES = ("head", "tensor")


@dataclass(frozen=True)
class Scaled:
    """Scales of one layer's keys or values. `scale` float32 [heads] or [1]; `clip_rate` the share of values beyond
    what the scale can express; `relative_error` root of the squared rounding error by that of the values."""

    scale: torch.Tensor
    amax: torch.Tensor
    clip_rate: float
    relative_error: float
    silent: bool = False
    """Only zeros came by: the scale is 1."""


def amax_scale(seen: Magnitudes, plugin: KVDtype) -> torch.Tensor:
    """The largest value becomes the largest code."""
    return seen.amax / _largest(plugin)


def percentile_scale(seen: Magnitudes, plugin: KVDtype) -> torch.Tensor:
    """PERCENTILE of all values fit; the rest are clipped."""
    share = seen.counts.cumsum(1).double() / seen.counts.sum(1, keepdim=True)
    place = (share < PERCENTILE).sum(1).clamp_max(seen.counts.shape[1] - 1)
    found = bin_centers()[place]
    # Where nearly all are zeros, the others decide.
    return torch.where(found > 0, torch.minimum(found, seen.amax), seen.amax) / _largest(plugin)


def mse_scale(seen: Magnitudes, plugin: KVDtype) -> torch.Tensor:
    """The least squared rounding error among scales around the largest value's."""
    out = []
    for counts, amax in zip(seen.counts, seen.amax, strict=True):
        tried = amax / _largest(plugin) * torch.exp2(STEPS)
        errors = torch.stack([_squared_error(counts, s, plugin) for s in tried])
        # Scales that round equally well differ by noise: of those, the one nearest to the largest value's.
        good = (errors <= errors.min() * 1.001).nonzero().flatten()
        out.append(tried[good[STEPS[good].abs().argmin()]])
    return torch.stack(out)


METHODS: dict[str, Callable[[Magnitudes, KVDtype], torch.Tensor]] = {
    "amax": amax_scale, "percentile": percentile_scale, "mse": mse_scale,
}  # fmt: skip


def choose(seen: Magnitudes, plugin: KVDtype, method: str, granularity: str, what: str) -> Scaled:
    """Scales by one method. Raises CheckpointError when the values were not finite."""
    if not bool(torch.isfinite(seen.amax).all()):
        raise CheckpointError(f"{what} are not finite", hint="a model whose 16-bit outputs are finite")
    if granularity == "tensor":
        merged = Magnitudes(1)
        merged.counts, merged.amax = seen.counts.sum(0, keepdim=True), seen.amax.max()[None]
        seen = merged
    empty = seen.amax == 0
    known = Magnitudes(len(empty))
    known.counts, known.amax = seen.counts, torch.where(empty, _largest(plugin), seen.amax)
    scale = torch.where(empty, 1.0, METHODS[method](known, plugin)).clamp_min(LEAST_SCALE)
    centers, limit = bin_centers(), scale * _largest(plugin)
    beyond = (seen.counts * (centers > limit[:, None] * (1 + 2**-6))).sum()
    error = sum(float(_squared_error(c, s, plugin)) for c, s in zip(seen.counts, scale, strict=True))
    power = float((seen.counts.double() * centers.double().square()).sum())
    return Scaled(
        scale.float(), seen.amax, float(beyond / seen.counts.sum()), (error / max(power, 1e-30)) ** 0.5,
        bool(empty.any()),
    )  # fmt: skip


def _largest(plugin: KVDtype) -> float:
    assert plugin.max_value is not None
    return plugin.max_value


def _squared_error(counts: torch.Tensor, scale: torch.Tensor, plugin: KVDtype) -> torch.Tensor:
    """Of all values of a histogram, float64."""
    centers = bin_centers()
    rounded = plugin.decode(plugin.encode(centers / scale), torch.float32) * scale
    return (counts * (rounded - centers).double().square()).sum()


def attention_error(
    seen: KVObserver, plugins: tuple[KVDtype, KVDtype], k: torch.Tensor, v: torch.Tensor
) -> float:
    """What these scales do to the layer's output on the example that the observer kept: root of the squared error
    by that of the exact output. `plugins` store K and V; k and v float32 [heads] or [1]."""
    assert seen.example is not None
    q, keys, values = seen.example
    spec: AttentionSpec = seen.spec

    def rounded(plugin: KVDtype, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return plugin.decode(plugin.encode(x / scale[:, None]), torch.float32) * scale[:, None]

    exact = plain_attention(q, keys, values, spec, len(q))
    got = plain_attention(q, rounded(plugins[0], keys, k), rounded(plugins[1], values, v), spec, len(q))
    return float((got - exact).norm() / exact.norm().clamp_min(1e-30))
