"""Which linears of a model may live in host memory, by decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from qengine.errors import ConfigError
from qengine.layers.linear import Linear
from qengine.layers.moe import ExpertLinear
from qengine.models.model import Model


def layer_linears(model: Model) -> dict[str, list[Linear]]:
    """The linears of each decoder layer, by its name, in the order of the model. A layer is what its attention module
    lies in; embeddings and the output layer are in none."""
    layers: dict[str, list[Linear]] = {layer.name.rpartition(".")[0]: [] for layer in model.attention}
    for leaf in model.linears():
        home = next((name for name in _parents(leaf.name) if name in layers), None)
        if home is not None:
            layers[home].append(leaf)
    return {name: leaves for name, leaves in layers.items() if leaves}


def expert_units(model: Model, patterns: str | None) -> dict[str, list[Linear]]:
    """The experts of each layer, where slots are asked for: all of them, or those that `patterns` name.

    Raises ConfigError for a model without experts, and for patterns that name anything else.
    """
    units = offload_units(model, patterns)
    if patterns is None:
        units = {name: [leaf for leaf in leaves if isinstance(leaf, ExpertLinear)] for name, leaves in units.items()}
    for leaves in units.values():
        experts = [leaf for leaf in leaves if isinstance(leaf, ExpertLinear)]
        parts = {id(leaf.group) for leaf in experts}
        halves = {id(group) for leaf in experts for group in (leaf.group.layer.gate_up, leaf.group.layer.down)} - parts
        others = [leaf.name for leaf in leaves if not isinstance(leaf, ExpertLinear)]
        if others or halves:
            raise ConfigError(
                "--expert-slots goes with offload of whole experts and nothing else",
                have=f"--offload-layers {patterns}" + (f", which names {others[0]} too" if others else ""),
                need="patterns that name experts, such as *.experts",
            )
    units = {name: leaves for name, leaves in units.items() if leaves}
    if not units:
        raise ConfigError(
            "--expert-slots is for mixtures of experts",
            have="a model whose layers have none",
            need="--expert-slots 0",
            hint="leave --expert-slots out",
        )
    return units


def offload_units(model: Model, patterns: str | None) -> dict[str, list[Linear]]:
    """Those of each layer that `patterns` (--offload-layers) name; all for None. Layers without any are left out.

    A pattern names a module if it matches its name, one of its checkpoint modules' or that of a module around it.
    Experts of a layer go together, because they may run as one. Raises ConfigError for a pattern that names nothing.
    """
    layers = layer_linears(model)
    if patterns is None:
        return layers
    wanted = [p.strip() for p in patterns.split(",")]
    found: dict[str, list[Linear]] = {}
    used: set[str] = set()
    for name, leaves in layers.items():
        hits = {id(leaf): matched for leaf in leaves if (matched := _matched(leaf, wanted))}
        used.update(*hits.values())
        groups = {id(leaf.group) for leaf in leaves if isinstance(leaf, ExpertLinear) and id(leaf) in hits}
        own = [x for x in leaves if id(x) in hits or (isinstance(x, ExpertLinear) and id(x.group) in groups)]
        if own:
            found[name] = own
    if unused := [p for p in wanted if p not in used]:
        some = [leaf.name for leaf in next(iter(layers.values()), [])[:4]]
        raise ConfigError(
            "--offload-layers names no linear of a decoder layer",
            have=", ".join(unused),
            need=f"names or patterns such as {', '.join(some)}, *.mlp",
        )
    return found


def _matched(leaf: Linear, patterns: list[str]) -> set[str]:
    names = {leaf.name, *(spec.name for spec in leaf.specs)}
    names |= {parent for name in list(names) for parent in _parents(name)}
    return {p for p in patterns if any(fnmatchcase(name, p) for name in names)}


def _parents(name: str) -> Iterator[str]:
    """ "a.b.c" -> "a.b", "a" """
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
