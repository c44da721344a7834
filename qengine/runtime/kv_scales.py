"""The one resolver of KV-cache scales: from the checkpoint's names to a pair of scales for each attention layer.

It works on checkpoint names, before any fused module exists. Writers spell scales in many ways (see SPELLINGS); every
tensor in the file that looks like one is used, named in a note, or an error. A scale multiplies to dequantise; it has
to be finite and above MIN_SCALE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.errors import CheckpointError
from qengine.layers.attention import Attention
from qengine.plugin import KVDtype, KVScales
from qengine.runtime.accounting import first_names
from qengine.runtime.kv_cache import default_scales
from qengine.runtime.loader import TensorSource

MIN_SCALE = 1e-6
"""Smaller values have only been seen as uninitialised memory written by a calibration that never ran."""

SPELLINGS: dict[str, str] = {
    "k_scale": "k",
    "v_scale": "v",
    "attn.k_scale": "k",
    "attn.v_scale": "v",
    "k_proj.k_scale": "k",
    "v_proj.v_scale": "v",
    "qkv_proj.k_scale": "k",
    "qkv_proj.v_scale": "v",
    "k_proj.output_scale": "k",
    "v_proj.output_scale": "v",
    "k_cache.scale": "k",
    "v_cache.scale": "v",
    "kv_scale": "kv",
}
"""Name under the attention module -> what it scales. Sources: llm-compressor and AutoFP8 (k_scale), ModelOpt
(k_proj.k_scale), early AutoFP8 (kv_scale, output_scale), Quark (output_scale)."""

ZERO_POINTS = ("k_zero_point", "v_zero_point")

UNUSED = ("q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale", "q_zero_point", "prob_output_scale")
"""Scales of quantised queries and probabilities: attention runs in higher precision here, so they are not needed."""

LOOKS_LIKE = re.compile(
    r"(^|\.)((k|v|kv|q)_scale|prob_output_scale|(q|k|v|qkv)_proj\.output_scale|(k|v)_cache\.scale|(q|k|v)_zero_point)$"
)


@dataclass
class ResolvedScales:
    """`scales` by attention name, for every layer. `consumed` are the file's tensors that are dealt with here."""

    scales: dict[str, KVScales]
    consumed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def resolve_kv_scales(
    source: TensorSource,
    layers: Sequence[Attention],
    plugin: KVDtype,
    config: Mapping[str, Any] | None = None,
) -> ResolvedScales:
    """Find, read and check the scales of every layer. `config` is the checkpoint's quantisation config, as a check.

    Raises CheckpointError for scales that belong to no attention layer, that only some layers or only K or V have,
    that contradict each other, have an odd shape, or are not finite and above MIN_SCALE.
    """
    out = ResolvedScales({layer.name: default_scales(layer) for layer in layers})
    known = {layer.name: layer for layer in layers}
    found: dict[str, dict[str, list[str]]] = {}
    unused: list[str] = []
    for name in source.tensors:
        match = LOOKS_LIKE.search(name)
        if match is None:
            continue
        layer, leaf = _owner(name, known)
        if leaf in SPELLINGS:
            found.setdefault(layer, {}).setdefault(SPELLINGS[leaf], []).append(name)
        elif leaf in ZERO_POINTS:
            _require_zero(name, source)
        else:
            unused.append(name)
        out.consumed.add(name)
    if unused:
        out.notes.append(
            f"{len(unused)} scales of quantised queries or probabilities are not needed: attention computes in "
            f"16 bits or more ({first_names(unused, 2)})"
        )
    if found:
        _fill(out, found, source, known, plugin)
    elif _promised(config):
        out.warnings.append("the checkpoint's config speaks of a quantised KV cache, but the file holds no KV scales")
    return out


def _owner(name: str, known: Mapping[str, Attention]) -> tuple[str, str]:
    """(attention layer, the rest of the name)."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        layer, leaf = ".".join(parts[:i]), ".".join(parts[i:])
        if layer in known and (leaf in SPELLINGS or leaf in ZERO_POINTS or leaf in UNUSED):
            return layer, leaf
    example = next(iter(known), "no attention layer")
    raise CheckpointError(
        f"{name} looks like a KV scale and belongs to no attention layer of this model",
        need=f"a name such as {example}.k_scale",
    )


def _fill(
    out: ResolvedScales,
    found: Mapping[str, Mapping[str, list[str]]],
    source: TensorSource,
    known: Mapping[str, Attention],
    plugin: KVDtype,
) -> None:
    bare = [name for name in known if name not in found]
    if bare:
        raise CheckpointError(
            f"{len(found)} attention layers have KV scales and {len(bare)} have none: {first_names(bare)}",
            hint="scales for all layers, or for none",
        )
    if plugin.max_value is None:
        out.notes.append(f"KV scales in the checkpoint are not used: KV dtype {plugin.name} stores values unscaled")
        return
    for name, kinds in found.items():
        layer = known[name]
        shared = kinds.get("kv", [])
        pair = {}
        for kind in ("k", "v"):
            names = [*kinds.get(kind, []), *shared]
            if not names:
                have = first_names([n for group in kinds.values() for n in group])
                raise CheckpointError(f"{name} has a scale for only one of K and V", have=have)
            pair[kind] = _agreed(names, source, layer.spec.num_kv_heads, plugin)
        out.scales[name] = KVScales(pair["k"], pair["v"], "checkpoint")


def _agreed(names: Sequence[str], source: TensorSource, heads: int, plugin: KVDtype) -> torch.Tensor:
    """The value that all spellings of one scale agree on, float32 [heads]."""
    values = [_read(name, source, heads, plugin) for name in names]
    for name, value in zip(names[1:], values[1:], strict=True):
        if not torch.equal(value, values[0]):
            raise CheckpointError(
                f"{names[0]} and {name} scale the same thing differently",
                have=f"{values[0].tolist()} and {value.tolist()}",
            )
    return values[0]


def _read(name: str, source: TensorSource, heads: int, plugin: KVDtype) -> torch.Tensor:
    value = source.read(name).to(torch.float32).flatten()
    if not bool((torch.isfinite(value) & (value > MIN_SCALE)).all()):
        raise CheckpointError(
            f"{name} is no usable KV scale", have=value.tolist()[:8], need=f"finite and > {MIN_SCALE:g}",
            hint="calibrate again; scales like these come from a calibration that never ran",
        )
    if value.numel() == 1:
        return value.expand(heads).clone()
    if value.numel() != heads:
        shape = list(source.tensors[name].shape)
        raise CheckpointError(f"{name} has an odd shape", have=shape, need=f"one value, or one per KV head ({heads})")
    if "head" not in plugin.scale_granularity:
        raise CheckpointError(
            f"{name} scales each head on its own", need=f"a KV dtype with scales per head, not {plugin.name}"
        )
    return value


def _require_zero(name: str, source: TensorSource) -> None:
    if bool(source.read(name).to(torch.float32).count_nonzero()):
        raise CheckpointError(f"{name} is not zero", need="symmetric KV quantisation")


def _promised(config: Mapping[str, Any] | None) -> bool:
    """Whether a quantisation config says that the KV cache has static scales."""
    scheme = (config or {}).get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return not scheme.get("dynamic", False)
    return scheme == "static"
