"""Moves factors on channels from the linears that read a vector into what produces it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qengine.layers.feeds import Feed
from qengine.layers.linear import Linear
from qengine.layers.norm import RMSNorm
from qengine.plugin import LinearSpec


class LayerWeights:
    """The float tensors of one layer by name: float32 to work with, and the dtype in which each is stored.

    `changed` names those that folding changed.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the tensors out of the dict, so that the stored ones don't stay beside their float32 copies."""
        self.dtypes = {name: t.dtype for name, t in tensors.items()}
        self.values = {name: tensors.pop(name).to(torch.float32) for name in list(tensors)}
        self.changed: set[str] = set()

    def stored(self, name: str) -> torch.Tensor:
        """As it goes to the file."""
        return self.values[name].to("cpu", self.dtypes[name])

    def set(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value
        self.changed.add(name)


def specs_of(feed: Feed) -> list[LinearSpec]:
    return [spec for leaf in feed.readers for spec in leaf.specs]


def can_fold(feed: Feed, accepted: Sequence[str]) -> bool:
    """Whether there is a producer and at least one reader that will be quantised."""
    return feed.producer is not None and any(spec.name in accepted for spec in specs_of(feed))


def fold(feed: Feed, factors: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
    """Divide what `feed.producer` makes by `factors` [K] and multiply the readers' columns by the same.

    A norm stays in its stored dtype, so the factors are first bent to what it can express: they are returned, and the
    readers' columns undo the norm's change exactly.
    """
    producer = feed.producer
    if isinstance(producer, RMSNorm):
        factors = _divide_norm(producer, factors, weights)
    elif isinstance(producer, Linear):
        assert feed.channels is not None
        _divide_rows(producer, feed.channels.to(factors.device), factors, weights)
    for spec in specs_of(feed):
        name = f"{spec.name}.weight"
        weights.set(name, weights.values[name] * factors)
    return factors


def _divide_norm(norm: RMSNorm, factors: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
    name = f"{norm.name}.weight"
    old = weights.values[name]
    whole = norm.offset + old
    new = (whole / factors - norm.offset).to(weights.dtypes[name]).to(torch.float32)
    moved = norm.offset + new
    usable = (whole != 0) & (moved != 0) & torch.isfinite(moved)
    weights.set(name, torch.where(usable, new, old))
    return torch.where(usable, whole / torch.where(usable, moved, 1.0), 1.0)


def _divide_rows(
    producer: Linear, channels: torch.Tensor, factors: torch.Tensor, weights: LayerWeights
) -> None:
    """Several channels may come from one row; they have equal factors then."""
    rows = torch.ones(producer.out_features, device=factors.device)
    rows[channels] = factors
    first = 0
    for spec in producer.specs:
        own = rows[first : first + spec.out_features]
        first += spec.out_features
        if bool((own == 1).all()):
            continue
        weights.set(f"{spec.name}.weight", weights.values[f"{spec.name}.weight"] / own[:, None])
        if spec.bias:
            weights.set(f"{spec.name}.bias", weights.values[f"{spec.name}.bias"] / own)
