"""Stored linears of random bits, for the conformance kit: what `WeightQuant.samples` may return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qengine.plugin.random_tensors import RandomTensors
from qengine.plugin.weights import LinearSpec, TensorInfo, WeightQuant, WeightSample

SAMPLE_SPEC = LinearSpec("model.layers.0.mlp.up_proj", 192, 48)


def dummy_samples(
    plugin: type[WeightQuant],
    configs: Sequence[Mapping[str, Any] | None],
    spec: LinearSpec = SAMPLE_SPEC,
    extra: Mapping[str, TensorInfo] | None = None,
) -> list[WeightSample]:
    """One linear for each config: the tensors that its `expected` names, and `extra` ones by leaf name, filled by its
    `dummy`. The same each time.

    Raises ValueError for a config that leaves the linear in 16 bits.
    """
    found = []
    for config in configs:
        quant = plugin.parse(config)
        held = quant.expected(spec)
        if held is None:
            raise ValueError(f"{config} leaves {spec.name} in 16 bits")
        random = RandomTensors(torch.Generator().manual_seed(0))
        found.append(WeightSample(config, spec, quant.dummy(spec, {**held, **(extra or {})}, random)))
    return found
