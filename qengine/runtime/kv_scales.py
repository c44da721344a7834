"""The one resolver of KV-cache scales: from the checkpoint's names to a pair of scales for each attention layer.

It works on checkpoint names, before any fused module exists. Writers spell scales in many ways (see SPELLINGS); every
tensor in the file that looks like one is used, named in a note or warning, or an error. A scale multiplies to
dequantise; it has to be finite and above MIN_SCALE.

Where a layer's K or V has several, the first of these counts, and the report says which:

1. a calibration file made for this model and KV dtype (--kv-scales, else beside the model; see `kv_sidecar`); it comes
   before the checkpoint because somebody made it for this, and where it serves any layer, the checkpoint's scales are
   not looked at
2. the attention module's own: k_scale, attn.k_scale, k_cache.scale
3. its projections': k_proj.k_scale, qkv_proj.k_scale
4. a projection's output scale: k_proj.output_scale (measured before rotary embedding)
5. one for K and V: kv_scale
6. 1.0

Two of one rank that differ are an error; of different ranks a warning. A side whose KV dtype takes no scales gets none.
"""

from __future__ import annotations

import math
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
from qengine.runtime.kv_dtypes import KVDtypes
from qengine.runtime.kv_sidecar import KVSidecar
from qengine.runtime.survey import TensorSource, grouped

MIN_SCALE = 1e-6
"""Smaller values have only been seen as uninitialised memory written by a calibration that never ran."""

SPELLINGS: dict[str, tuple[str, int]] = {
    "k_scale": ("k", 2),
    "v_scale": ("v", 2),
    "attn.k_scale": ("k", 2),
    "attn.v_scale": ("v", 2),
    "k_cache.scale": ("k", 2),
    "v_cache.scale": ("v", 2),
    "k_proj.k_scale": ("k", 3),
    "v_proj.v_scale": ("v", 3),
    "qkv_proj.k_scale": ("k", 3),
    "qkv_proj.v_scale": ("v", 3),
    "k_proj.output_scale": ("k", 4),
    "v_proj.output_scale": ("v", 4),
    "kv_scale": ("kv", 5),
}
"""Name under the attention module -> what it scales, and its rank in the list above. Sources: llm-compressor and
AutoFP8 (k_scale), ModelOpt (k_proj.k_scale), early AutoFP8 (kv_scale, output_scale), Quark (output_scale)."""

ZERO_POINTS = ("k_zero_point", "v_zero_point", "k_proj.output_zero_point", "v_proj.output_zero_point")

UNUSED = (
    "q_scale", "attn.q_scale", "q_proj.q_scale", "qkv_proj.q_scale", "q_proj.output_scale", "q_proj.output_zero_point",
    "q_zero_point", "prob_output_scale",
)  # fmt: skip
"""Scales of quantised queries and probabilities: attention runs in higher precision here, so they are not needed."""

LOOKS_LIKE = re.compile(
    r"(^|\.)((k|v|kv|q)_scale|prob_output_scale|(q|k|v|qkv)_proj\.output_(scale|zero_point)|(k|v)_cache\.scale"
    r"|(q|k|v)_zero_point)$"
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
    kv: KVDtypes,
    config: Mapping[str, Any] | None = None,
    sidecar: KVSidecar | None = None,
) -> ResolvedScales:
    """Find, read and check the scales of every layer. `config` is the checkpoint's quantisation config, as a check;
    `sidecar` a calibration file.

    Raises CheckpointError for scales that belong to no attention layer; and, where layers take scales, for ones that
    only some of those or only K or V have, that contradict each other, are made for another kind of cache, have an odd
    shape, or are not finite and above MIN_SCALE.
    """
    out = ResolvedScales({layer.name: default_scales(layer) for layer in layers})
    known = {layer.name: layer for layer in layers}
    found: dict[str, dict[str, list[tuple[int, str]]]] = {}
    zero_points: list[str] = []
    unused: list[str] = []
    for name in source.tensors:
        if LOOKS_LIKE.search(name) is None:
            continue
        layer, leaf = _owner(name, known)
        if leaf in SPELLINGS:
            kinds, rank = SPELLINGS[leaf]
            for kind in kinds:
                found.setdefault(layer, {}).setdefault(kind, []).append((rank, name))
        elif leaf in ZERO_POINTS:
            zero_points.append(name)
        else:
            unused.append(name)
        out.consumed.add(name)
    if unused:
        out.notes.append(
            f"{len(unused)} scales of quantised queries or probabilities are not needed: attention computes in "
            f"16 bits or more ({first_names(unused, 2)})"
        )
    sides = _scaled_sides(kv)
    if sidecar is not None and _calibrated(out, sidecar, known, kv, sides):
        if found:
            out.notes.append(f"KV scales in the checkpoint are not used: those of {sidecar.path} are")
    elif found and not sides:
        out.notes.append(
            f"KV scales in the checkpoint are not used: KV dtype {kv.name} takes none (--kv-dtype fp8 uses them)"
        )
    elif found:
        _check_scheme(config)
        _require_zero(zero_points, source)
        _fill(out, found, source, known, sides)
    elif _promised(config):
        out.warnings.append("the checkpoint's config speaks of a quantised KV cache, but the file holds no KV scales")
    return out


Sides = dict[str, dict[str, type[KVDtype]]]
"""By attention name and kind ("k", "v"): the plugin, of those that take scales. Layers without any are left out."""


def _scaled_sides(kv: KVDtypes) -> Sides:
    out: Sides = {}
    for name, pair in kv.sides.items():
        for kind, plugin in zip(("k", "v"), pair, strict=True):
            if plugin.max_value is not None:
                out.setdefault(name, {})[kind] = plugin
    return out


def _calibrated(
    out: ResolvedScales, sidecar: KVSidecar, known: Mapping[str, Attention], kv: KVDtypes, sides: Sides
) -> bool:
    """Take the scales of a calibration file; False when it is not for these KV dtypes."""
    if not sides:
        out.notes.append(f"{sidecar.path} is not used: KV dtype {kv.name} takes no scales")
        return False
    about = " and ".join(sidecar.kv_dtypes)
    fitting = {
        f"{name}.{kind}_scale": (name, kind, plugin)
        for name, own in sides.items()
        for kind, plugin in own.items()
        if sidecar.dtype_of(name, kind) == plugin.name
    }
    if not fitting:
        out.warnings.append(f"{sidecar.path} is for KV dtype {about}, not {kv.name}: it is not used")
        return False
    strangers = {n for n in sidecar.tensors if n.rpartition(".")[0] not in known}
    if odd := (set(fitting) - set(sidecar.tensors)) | strangers:
        raise CheckpointError(
            f"{sidecar.path} does not hold the scales of this model's layers: {first_names(sorted(odd))}"
        )
    for leaf, (name, kind, plugin) in fitting.items():
        setattr(out.scales[name], kind, _read(leaf, sidecar, known[name].spec.num_kv_heads, plugin))
        out.scales[name].source = sidecar.source
    rest = [f"{name}.{kind}" for name, own in sides.items() for kind in own if f"{name}.{kind}_scale" not in fitting]
    if rest:
        out.warnings.append(f"{sidecar.path} is for KV dtype {about}: it has no scales for {first_names(rest)}")
    return True


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
    found: Mapping[str, Mapping[str, list[tuple[int, str]]]],
    source: TensorSource,
    known: Mapping[str, Attention],
    sides: Sides,
) -> None:
    """Take the scales of the checkpoint for those sides that take some."""
    bare = [name for name in sides if name not in found]
    if bare:
        raise CheckpointError(
            f"{len(found)} attention layers have KV scales and {len(bare)} have none: {first_names(bare)}",
            hint="scales for all layers, or for none",
        )
    overruled: list[tuple[str, str]] = []
    for layer_name, own in sides.items():
        kinds = found[layer_name]
        leaves: dict[str, None] = {}
        for kind, plugin in own.items():
            if kind not in kinds:
                have = first_names([name for names in kinds.values() for _, name in names])
                raise CheckpointError(f"{layer_name} has a scale for only one of K and V", have=have)
            names = sorted(kinds[kind])
            first = names[0][1]
            heads = known[layer_name].spec.num_kv_heads
            setattr(out.scales[layer_name], kind, _read(first, source, heads, plugin))
            leaf = first.removeprefix(layer_name + ".")
            leaves[leaf] = None
            overruled += [
                (other, f"{leaf} counts, {other.removeprefix(layer_name + '.')} says otherwise")
                for other in _differing(names, source)
            ]
        out.scales[layer_name].source = "checkpoint " + ", ".join(leaves)
    out.warnings += [f"two KV scales for one thing: {line}" for line in grouped(overruled, "tensor")]
    if unused := sum(2 - len(sides.get(name, {})) for name in known):
        out.notes.append(f"KV scales of {unused} layer sides in the checkpoint are not used: their dtypes take none")


def _differing(names: Sequence[tuple[int, str]], source: TensorSource) -> list[str]:
    """Names of lower rank whose value is not the first one's. Raises CheckpointError for one of the same rank."""
    rank, first = names[0]
    if len(names) == 1:
        return []
    value = source.read(first).float().flatten()
    out = []
    for other_rank, name in names[1:]:
        other = source.read(name).float().flatten()
        if torch.equal(other.expand_as(value) if other.numel() == 1 else other, value):
            continue
        if other_rank == rank:
            raise CheckpointError(
                f"{first} and {name} scale the same thing differently", have=f"{value.tolist()} and {other.tolist()}"
            )
        out.append(name)
    return out


def _read(name: str, source: TensorSource, heads: int, plugin: type[KVDtype]) -> torch.Tensor:
    """float32 [heads]."""
    shape = source.tensors[name].shape
    if math.prod(shape) not in (1, heads):
        raise CheckpointError(
            f"{name} has an odd shape", have=list(shape), need=f"one value, or one per KV head ({heads})"
        )
    value = source.read(name).to(torch.float32).flatten()
    if not bool((torch.isfinite(value) & (value > MIN_SCALE)).all()):
        raise CheckpointError(
            f"{name} is no usable KV scale", have=value.tolist()[:8], need=f"finite and > {MIN_SCALE:g}",
            hint="--kv-dtype auto, which needs none, or calibrating again: values like these come from a calibration "
            "that never ran",
        )
    if value.numel() == 1:
        return value.expand(heads).clone()
    if "head" not in plugin.scale_granularity:
        raise CheckpointError(
            f"{name} scales each head on its own", need=f"a KV dtype with scales per head, not {plugin.name}"
        )
    return value


def _require_zero(names: Sequence[str], source: TensorSource) -> None:
    odd = [name for name in names if source.read(name).to(torch.float32).count_nonzero()]
    if odd:
        verb = "is" if len(odd) == 1 else "are"
        raise CheckpointError(
            f"{first_names(odd)} {verb} not zero", need="symmetric KV quantisation", hint="--kv-dtype auto"
        )


def _scheme(config: Mapping[str, Any] | None) -> Any:
    """What a quantisation config says about the KV cache: compressed-tensors' and ModelOpt's dict, AutoFP8's string, or
    the name in ModelOpt's hf_quant_config.json."""
    inner = (config or {}).get("quantization")
    named = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
    return (config or {}).get("kv_cache_scheme") or named


def _check_scheme(config: Mapping[str, Any] | None) -> None:
    """Scales of another kind of cache mean something else: raise CheckpointError for them."""
    scheme = _scheme(config)
    kind: tuple[Any, Any] = ("float", 8)
    if isinstance(scheme, Mapping):
        kind = (scheme.get("type", "float"), scheme.get("num_bits", 8))
    elif isinstance(scheme, str) and scheme.lower() not in ("static", "dynamic", "fp8"):
        kind = (scheme, "")
    if kind != ("float", 8):
        raise CheckpointError(
            "the checkpoint's KV scales are made for another KV cache", have=" ".join(map(str, kind)).strip(),
            need="float 8", hint="--kv-dtype auto",
        )


def _promised(config: Mapping[str, Any] | None) -> bool:
    """Whether a quantisation config says that the KV cache has static scales."""
    scheme = _scheme(config)
    if isinstance(scheme, Mapping):
        return not scheme.get("dynamic", False)
    return isinstance(scheme, str) and scheme.lower() not in ("dynamic", "none")
