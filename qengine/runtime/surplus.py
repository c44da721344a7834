"""Layers and experts that a checkpoint holds beyond those its config counts.

A model of fewer layers than its weights were trained with runs and answers nonsense, so these are refused. What no
module of the model is like (vision towers, adapters) is not looked at here, and layers that only predict several tokens
ahead are known to be needless.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo
from qengine.runtime.accounting import first_names
from qengine.runtime.config_checks import EXPERTS, LAYERS

NUMBER = re.compile(r"[0-9]{1,9}")
PREDICTED = "num_nextn_predict_layers"
"""How many layers after the decoder's predict further tokens; DeepSeek's and GLM's are named like decoder layers."""

PREDICTS = "eh_proj"
"""The module that only such a layer has: it joins an embedding and a hidden state (DeepSeek-V3, section 2.2)."""


@dataclass
class Surplus:
    """`errors`: what the model would use if config.json counted it; `needless`: tensors of layers that predict further
    tokens, about which `notes` speak."""

    errors: list[CheckpointError] = field(default_factory=list)
    needless: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def surplus(
    extra: Iterable[str], tensors: Mapping[str, TensorInfo], modules: Collection[str], config: Mapping[str, Any]
) -> Surplus:
    """Sort what lies under numbers beyond the model's own. `extra` are the names of `tensors` that nothing takes,
    `modules` all modules of the model by checkpoint name, `config` is config.json as written."""
    counted, kinds = _counted(modules), {_pattern(name) for name in modules}
    groups: dict[str, dict[int, list[str]]] = {}
    for name in extra:
        if place := _beyond(name, counted):
            groups.setdefault(place[0], {}).setdefault(place[1], []).append(name)
    out = Surplus()
    found: dict[tuple[str, int], dict[int, list[str]]] = {}
    for prefix, by_number in groups.items():
        own = max(counted[prefix]) + 1
        for number, names in by_number.items():
            if _predicts(number, names, own, prefix, config):
                out.needless.update(names)
                out.notes.append(
                    f"ignored: {prefix}.{number}, a layer that predicts further tokens, which this engine does not do "
                    f"({len(names)} tensors)"
                )
            elif any(_pattern(name.rpartition(".")[0]) in kinds and math.prod(tensors[name].shape) for name in names):
                found.setdefault((_pattern(prefix), own), {}).setdefault(number, []).extend(names)
    out.errors = [_error(prefix, own, by_number, config) for (prefix, own), by_number in found.items()]
    return out


def _counted(modules: Iterable[str]) -> dict[str, set[int]]:
    """The numbers that stand behind each prefix ("model.layers", "model.layers.0.mlp.experts")."""
    counted: dict[str, set[int]] = {}
    for name in modules:
        for prefix, number in _numbers(name.split(".")):
            counted.setdefault(prefix, set()).add(number)
    return counted


def _numbers(parts: Sequence[str]) -> Iterable[tuple[str, int]]:
    return ((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if i and NUMBER.fullmatch(part))


def _pattern(name: str) -> str:
    return ".".join("*" if NUMBER.fullmatch(part) else part for part in name.split("."))


def _beyond(name: str, counted: Mapping[str, set[int]]) -> tuple[str, int] | None:
    """The first prefix and number in a tensor's name that the model does not have, if it is one beyond the last."""
    for prefix, number in _numbers(name.split(".")):
        own = counted.get(prefix, set())
        if number not in own:
            return (prefix, number) if own and number > max(own) else None
    return None


def _predicts(number: int, names: Sequence[str], own: int, prefix: str, config: Mapping[str, Any]) -> bool:
    if prefix.endswith("experts"):
        return False
    stated = [value for _, value in _stated(config, (PREDICTED,))]
    return number < own + max(stated, default=0) or any(PREDICTS in name.split(".") for name in names)


def _stated(config: Mapping[str, Any], fields: Iterable[str]) -> list[tuple[str, int]]:
    """(field as it is found in config.json, value) of those that hold a number."""
    homes = [("", config), ("text_config.", config.get("text_config"))]
    return [
        (home + name, values[name])
        for home, values in homes
        if isinstance(values, Mapping)
        for name in fields
        if type(values.get(name)) is int
    ]


def _error(prefix: str, own: int, by_number: Mapping[int, list[str]], config: Mapping[str, Any]) -> CheckpointError:
    what, fields = ("experts", EXPERTS) if prefix.endswith("experts") else ("layers", LAYERS)
    counts = [name for name, value in _stated(config, fields) if value == own]
    says = counts[0] if counts else f"{what} by config.json"
    names = [name for own_names in by_number.values() for name in own_names]
    last = max(by_number)
    return CheckpointError(
        f"the file holds {what} that config.json does not count, and without which the model answers nonsense: "
        f"{len(names)} tensor(s), {first_names(names, 3)}",
        have=f"{says} {own}, the file has {prefix}.0..{last}", need=f"{says} {last + 1}",
        hint="the config.json that belongs to these weights",
    )
