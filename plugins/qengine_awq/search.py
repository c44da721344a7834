"""AWQ's two searches, on moments instead of samples: factors on input channels, and how far to clip each group.

Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration". The paper
measures errors on a few hundred sampled inputs; the mean of x x^T gives the same errors exactly, over all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qengine.plugin import InputStats, tie

EXPONENTS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Factors are mean |x| to one of these powers; 0 leaves everything as it is."""
REFINE = 0.075
"""Then both sides of the best one, so far away."""
SEARCH_ROWS = 256
"""Rows of the readers together that errors are measured on, spread evenly."""

Round = Callable[[torch.Tensor], torch.Tensor]
"""weight [N, K] -> the weight that its quantised form means."""


def search_factors(
    weights: Sequence[torch.Tensor], stats: InputStats, channels: torch.Tensor | None, rounded: Round
) -> torch.Tensor | None:
    """The factors with the least output error after plain rounding, or None when leaving them out is best.

    `weights` are the readers' [N, K], float32.
    """
    sample = torch.cat([sample_rows(w, sum(len(x) for x in weights)) for w in weights])
    size = tie(stats.mean_abs.clamp_min(1e-8), channels)
    known: dict[float, float] = {}

    def error(exponent: float) -> float:
        if exponent not in known:
            f = factors(size, exponent)
            known[exponent] = stats.output_error(rounded(sample * f) / f - sample)
        return known[exponent]

    best = min(EXPONENTS, key=error)
    best = min((best, best - REFINE, best + REFINE), key=lambda e: error(e) if e >= 0 else float("inf"))
    return None if best == 0 else factors(size, best)


def sample_rows(weight: torch.Tensor, total: int) -> torch.Tensor:
    """This weight's part of SEARCH_ROWS rows out of `total`."""
    count = min(len(weight), max(1, len(weight) * SEARCH_ROWS // total))
    index = torch.arange(count, device=weight.device) * len(weight) // count
    return weight[index]


def factors(size: torch.Tensor, exponent: float) -> torch.Tensor:
    """size ** exponent, scaled so that the smallest and the largest are equally far from 1, within bounds that keep
    scales and norms in float16."""
    f = size**exponent
    f = f / (f.max() * f.min()).sqrt()
    return f.clamp(2.0**-10, 2.0**10)


def group_moments(stats: InputStats, size: int) -> torch.Tensor:
    """[groups, size, size]: the blocks on the moment's diagonal, scaled to a mean of 1 on their diagonals. Where a
    group saw nothing but zeros, plain squared errors count."""
    assert stats.moment is not None
    groups = len(stats.moment) // size
    blocks = torch.stack([stats.moment[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(groups)])
    power = blocks.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    plain = torch.eye(size, device=blocks.device).expand_as(blocks)
    return torch.where(power > 0, blocks / torch.where(power > 0, power, 1.0), plain)
