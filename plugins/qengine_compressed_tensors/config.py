"""The `quantization_config` of a compressed-tensors checkpoint: groups of modules and how each is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qengine.plugin.patterns import NamePattern
from qengine_compressed_tensors.arguments import Args, as_mapping, read_args, refuse_unknown, short

READ = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
NOTHING_STORED = ("dense", "mixed-precision", "fakequant")
"""Formats that say nothing about how a group is stored: no quantised weights, each group its own, none stated."""
REFUSED = {
    "nvfp4-pack-quantized": "4-bit floats (NVFP4)",
    "mxfp4-pack-quantized": "4-bit floats (MXFP4)",
    "mxfp6-pack-quantized": "6-bit floats (MXFP6)",
    "mxfp8-quantized": "8-bit floats with shared exponents (MXFP8)",
    "marlin-24": "2:4 sparse weights",
    "sparse-bitmask": "sparse weights",
    "sparse-24-bitmask": "2:4 sparse weights",
}
WOULD_WORK = "a copy of the model quantised to W4A16, W8A16, W8A8 or FP8 would work"

KNOWN = {
    "quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme",
    "global_compression_ratio", "sparsity_config", "transform_config", "version", "run_compressed",
    "quantization_config", "compression_ratio",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """An entry of `targets` or `ignore` as written: a module's name, a "re:" pattern, or the name of a class."""

    text: str
    pattern: NamePattern | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Group:
    """One entry of config_groups. `format` is the group's own or the global one; `own_format` says which. `weights`
    None: a group about attention or the KV cache only."""

    name: str
    targets: tuple[Target, ...]
    weights: Args | None
    inputs: Args | None
    format: str
    own_format: bool


@dataclass(frozen=True)
class Config:
    """`groups` in file order, those without quantised weights left out; `version` of the writer as
    numbers, empty when unknown."""

    groups: tuple[Group, ...] = ()
    ignore: tuple[Target, ...] = ()
    version: tuple[int, ...] = ()
    stated: bool = field(default=True)


def read_config(config: Mapping[str, Any] | None) -> Config:
    """Raises ValueError naming field and value for what is not read here."""
    if config is None:
        return Config(stated=False)
    nested = config.get("quantization_config")
    if isinstance(nested, Mapping):  # compression_config of the first llm-compressor
        config = {**{k: v for k, v in config.items() if k != "quantization_config"}, **nested}
    refuse_unknown("quantization_config", config, KNOWN)
    check_trivial(config)
    form = read_format("format", config.get("format")) or "fakequant"
    raw_groups = config.get("config_groups")
    groups = []
    for name, raw in as_mapping("config_groups", {} if raw_groups is None else raw_groups).items():
        group = read_group(f"config_groups.{name}", raw, form)
        if group.weights is not None:
            groups.append(group)
    return Config(tuple(groups), read_names("ignore", config.get("ignore")), read_version(config.get("version")))


def check_trivial(config: Mapping[str, Any]) -> None:
    """Sparse and transformed weights mean something else than their bytes say."""
    method = config.get("quant_method")
    if method is not None and str(method).lower() not in ("compressed-tensors", "compressed_tensors"):
        raise ValueError(f"quant_method {short(method)} is not compressed-tensors: these weights are in another format")
    sparsity = config.get("sparsity_config") or {}
    form = as_mapping("sparsity_config", sparsity).get("format", "dense")
    if form not in (None, "dense"):
        raise ValueError(f"sparsity_config.format {short(form)} (sparse weights) is not supported; {WOULD_WORK}")
    transforms = as_mapping("transform_config", config.get("transform_config") or {})
    names = transforms.get("config_groups") or {k: v for k, v in transforms.items() if v and k != "config_groups"}
    if names:
        raise ValueError(
            f"transform_config {short(dict(transforms))} (rotated weights) is not supported; {WOULD_WORK}"
        )


def read_group(where: str, raw: Any, default: str) -> Group:
    if isinstance(raw, list):
        raise ValueError(f"{where} {short(raw)} names a preset; need: its scheme written out (weights, targets, ...)")
    raw = as_mapping(where, raw)
    refuse_unknown(where, raw, {"targets", "weights", "input_activations", "output_activations", "format"})
    own = read_format(f"{where}.format", raw.get("format"))
    form = own or default
    weights = read_args(f"{where}.weights", raw.get("weights"))
    inputs = read_args(f"{where}.input_activations", raw.get("input_activations"))
    outputs = read_args(f"{where}.output_activations", raw.get("output_activations"))
    if weights is not None:
        if outputs is not None:
            raise ValueError(f"{where}.output_activations ({outputs}) is not supported; need: null")
        check_weights(f"{where}.weights", weights, form)
        check_inputs(f"{where}.input_activations", inputs)
    group = Group(where, read_names(f"{where}.targets", raw.get("targets")), weights, inputs, form, own is not None)
    if not group.targets:
        raise ValueError(f"{where}.targets is empty; need: names, re: patterns or class names")
    return group


def check_weights(where: str, weights: Args, form: str) -> None:
    """Refuse what no linear here computes."""
    if weights.dynamic:
        raise ValueError(f"{where}.dynamic {weights.dynamic!r} makes no sense for weights; need: false")
    if weights.type == "float":
        if weights.bits != 8:
            names = {"group": "MXFP4", "tensor_group": "NVFP4"}
            name = names.get(weights.strategy, f"{weights.bits}-bit floats") if weights.bits == 4 else "other floats"
            raise ValueError(
                f"{where}: num_bits {weights.bits} of type float ({name}) is not supported; need: 8; {WOULD_WORK}"
            )
        if weights.strategy not in ("tensor", "channel", "block"):
            need = "tensor, channel or block"
            raise ValueError(f"{where}.strategy {weights.strategy!r} is not supported for FP8 weights; need: {need}")
        if not weights.symmetric:
            raise ValueError(f"{where}.symmetric false is not supported for FP8 weights; need: true")
        return
    if not 2 <= weights.bits <= 8:
        raise ValueError(f"{where}.num_bits {weights.bits} is not supported; need: 2 to 8 for integers")
    if weights.strategy not in ("tensor", "channel", "group"):
        raise ValueError(
            f"{where}.strategy {weights.strategy!r} is not supported for integers; need: tensor, channel or group"
        )
    if form == "float-quantized":
        raise ValueError(f"{where}.type int contradicts format {short(form)}")


def check_inputs(where: str, inputs: Args | None) -> None:
    if inputs is not None and inputs.dynamic == "local":
        raise ValueError(f"{where}.dynamic 'local' (NVFP4 activations) is not supported; {WOULD_WORK}")


def read_format(where: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value in REFUSED:
        raise ValueError(f"{where} {short(value)} ({REFUSED[value]}) is not supported; {WOULD_WORK}")
    if value not in READ + NOTHING_STORED:
        raise ValueError(f"{where} {short(value)} is not known; need: {' | '.join(READ)}")
    return str(value)


def read_names(where: str, value: Any) -> tuple[Target, ...]:
    """A list of module names, class names and "re:" patterns; each pattern must compile."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{where} {short(value)} makes no sense; need: a list of names")
    return tuple(
        Target(text, NamePattern(where, text.removeprefix("re:"), text) if text.startswith("re:") else None)
        for text in value
    )


def read_version(value: Any) -> tuple[int, ...]:
    """Leading numbers of "0.19.0" or "0.17.1.a20260101"; empty when there are none."""
    match = re.match(r"\d{1,6}(\.\d{1,6}){0,3}", value) if isinstance(value, str) else None
    return tuple(int(n) for n in match[0].split(".")) if match else ()
