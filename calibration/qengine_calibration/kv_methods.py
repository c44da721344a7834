"""From what was seen of keys and values to scales: four rules, and what each scale does to the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qengine.errors import CheckpointError
from qengine.plugin import KVDtype
from qengine.runtime.kv_scales import MIN_SCALE
from qengine_calibration.attention_error import Example, side_errors
from qengine_calibration.observe import Magnitudes, bin_centers

PERCENTILE = 0.9999
STEPS = torch.arange(-24, 17) / 8
"""Octaves around the scale of the largest value that `mse` tries."""
PHASES = torch.arange(8) / 8
"""Octaves above that scale that `output` tries. A floating-point grid looks the same one octave on."""
SURE = 3.0
"""Standard errors by which another scale must beat the usual one to take its place."""
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

    @property
    def at_1(self) -> int:
        """How many scales are 1 because none is surely better."""
        return int(((self.scale == 1) & (self.amax > 0)).sum())


@dataclass(frozen=True)
class Seen:
    """Of one side of a layer: `sizes` of the values, all as one head where one scale is asked for; whole sequences as
    `examples`."""

    sizes: Magnitudes
    examples: Sequence[Example]
    plugin: KVDtype

    @property
    def largest(self) -> float:
        assert self.plugin.max_value is not None
        return self.plugin.max_value


def amax_scale(seen: Seen) -> torch.Tensor:
    """The largest value becomes the largest code."""
    return seen.sizes.amax / seen.largest


def percentile_scale(seen: Seen) -> torch.Tensor:
    """PERCENTILE of all values fit; the rest are clipped."""
    counts, amax = seen.sizes.counts, seen.sizes.amax
    share = counts.cumsum(1).double() / counts.sum(1, keepdim=True)
    place = (share < PERCENTILE).sum(1).clamp_max(counts.shape[1] - 1)
    found = bin_centers()[place]
    # Where nearly all are zeros, the others decide.
    return torch.where(found > 0, torch.minimum(found, amax), amax) / seen.largest


def mse_scale(seen: Seen) -> torch.Tensor:
    """The least squared rounding error among scales around the largest value's."""
    out = []
    for counts, amax in zip(seen.sizes.counts, seen.sizes.amax, strict=True):
        tried = amax / seen.largest * torch.exp2(STEPS)
        errors = torch.stack([_squared_error(counts, s, seen.plugin) for s in tried])
        # Scales that round equally well differ by noise: of those, the one nearest to the largest value's.
        good = (errors <= errors.min() * 1.001).nonzero().flatten()
        out.append(tried[good[STEPS[good].abs().argmin()]])
    return torch.stack(out)


def output_scale(seen: Seen) -> torch.Tensor:
    """The least squared error of the layer's output on the examples; where no other scale is surely better, 1.0, or if
    that clips, the largest value's.

    With enough range, scales differ by how the format's grid lies on the values, which changes little and is easily
    mistaken: hence the test.
    """
    amax = amax_scale(seen)
    usual = amax.clamp_min(1.0)
    others = [amax * step for step in torch.exp2(PHASES)] + [mse_scale(seen), percentile_scale(seen)]
    tried = torch.stack([usual, *others]).clamp_min(LEAST_SCALE)
    errors = side_errors(seen.examples, seen.plugin, tried)
    if len(amax) == 1:
        errors = errors.sum(1, keepdim=True)
    best = errors.sum(2).argmin(0)
    chosen = errors.gather(0, best[None, :, None].expand(1, -1, errors.shape[2]))[0]
    gain = errors[0] - chosen
    doubt = gain.std(1) / gain.shape[1] ** 0.5 if gain.shape[1] > 1 else torch.zeros(len(gain))
    sure = gain.mean(1) > SURE * doubt
    return torch.where(sure, tried.gather(0, best[None])[0], usual)


METHODS: dict[str, Callable[[Seen], torch.Tensor]] = {
    "output": output_scale, "mse": mse_scale, "amax": amax_scale, "percentile": percentile_scale,
}  # fmt: skip


def choose(
    sizes: Magnitudes, examples: Sequence[Example], plugin: KVDtype, method: str, granularity: str, what: str
) -> Scaled:
    """Scales by one method, for the plugin's side. Raises CheckpointError when the values were not finite."""
    if not bool(torch.isfinite(sizes.amax).all()):
        raise CheckpointError(f"{what} are not finite", hint="a model whose 16-bit outputs are finite")
    if granularity == "tensor":
        merged = Magnitudes(1)
        merged.counts, merged.amax = sizes.counts.sum(0, keepdim=True), sizes.amax.max()[None]
        sizes = merged
    empty = sizes.amax == 0
    known = Magnitudes(len(empty))
    seen = Seen(known, examples, plugin)
    known.counts, known.amax = sizes.counts, torch.where(empty, seen.largest, sizes.amax)
    scale = torch.where(empty, 1.0, METHODS[method](seen)).clamp_min(LEAST_SCALE)
    centers, limit = bin_centers(), scale * seen.largest
    beyond = (sizes.counts * (centers > limit[:, None] * (1 + 2**-6))).sum()
    error = sum(float(_squared_error(c, s, plugin)) for c, s in zip(sizes.counts, scale, strict=True))
    power = float((sizes.counts.double() * centers.double().square()).sum())
    return Scaled(
        scale.float(), sizes.amax, float(beyond / sizes.counts.sum()), (error / max(power, 1e-30)) ** 0.5,
        bool(empty.any()),
    )  # fmt: skip


def _squared_error(counts: torch.Tensor, scale: torch.Tensor, plugin: KVDtype) -> torch.Tensor:
    """Of all values of a histogram, float64."""
    centers = bin_centers()
    rounded = plugin.decode(plugin.encode(centers / scale), torch.float32) * scale
    return (counts * (rounded - centers).double().square()).sum()
