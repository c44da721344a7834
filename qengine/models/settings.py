"""What a model's config says, read once and checked: shapes, RoPE in both of its spellings, sliding windows.

Whatever a family does not implement is refused here by field name and value, before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qengine.errors import CheckpointError
from qengine.layers.activation import ACTIVATIONS
from qengine.layers.rotary import REQUIRED_PARAMETERS, RopeSpec

LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPE_ALIASES = {"su": "longrope"}
"""Names that older checkpoints use."""
ROPE_DEFAULT_THETA = 10000.0
ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""RoPE settings that are numbers, or lists of them, above 0 where they are given."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes that every decoder has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str


def refuse(config: Any, field: str, why: str, hint: str | None = None) -> CheckpointError:
    """The error for a config field that this family does not implement."""
    name = getattr(config, "model_type", type(config).__name__)
    value = getattr(config, field, None)
    return CheckpointError(f"{name}: config field {field} = {value!r}: {why}", hint=hint)


def read_shape(config: Any) -> DecoderShape:
    """Sizes of a decoder, checked. The activation is spelt hidden_act, or hidden_activation (Gemma, which wins)."""
    heads = positive(config, "num_attention_heads")
    kv_heads = (
        heads if getattr(config, "num_key_value_heads", None) is None else positive(config, "num_key_value_heads")
    )
    if heads % kv_heads:
        raise refuse(config, "num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    hidden = positive(config, "hidden_size")
    head_dim = positive(config, "head_dim") if getattr(config, "head_dim", None) else hidden // heads
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in ACTIVATIONS:
        field = "hidden_activation" if getattr(config, "hidden_activation", None) else "hidden_act"
        raise refuse(config, field, f"unknown activation; known: {', '.join(ACTIVATIONS)}")
    return DecoderShape(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.rms_norm_eps),
        activation=str(activation),
    )


def positive(config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise refuse(config, field, "a positive integer is needed")
    return value


def layer_windows(config: Any, num_layers: int) -> list[int | None]:
    """Sliding window of each layer from `layer_types` and `sliding_window`; None where a layer sees everything."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return [window] * num_layers
    if len(types) < num_layers:
        raise refuse(config, "layer_types", f"{len(types)} entries for {num_layers} layers")
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise refuse(config, "layer_types", f"unknown layer type {unknown[0]!r}; known: {', '.join(LAYER_TYPES)}")
    return [window if t == "sliding_attention" else None for t in types[:num_layers]]


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """RoPE settings from transformers 5's `rope_parameters` or from `rope_theta` and `rope_scaling`.

    `layer_type` picks an entry where the settings are given for each layer type (Gemma 3; its older spelling is
    `rope_local_base_freq`, unscaled, for the local layers).
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = getattr(config, "rope_theta", None)
    local = getattr(config, "rope_local_base_freq", None)
    if layer_type is not None and layer_type in found:
        found = found[layer_type] or {}
    elif layer_type == "sliding_attention" and local is not None:
        found, theta = {}, local
    elif any(isinstance(found.get(t), Mapping) for t in LAYER_TYPES):
        raise refuse(config, "rope_parameters", "this family has one rotary embedding, not one for each layer type")
    out = dict(found)
    if out.get("rope_theta") is None:
        out["rope_theta"] = ROPE_DEFAULT_THETA if theta is None else theta
    out["rope_type"] = out.get("rope_type") or out.get("type") or "default"
    out["rope_type"] = ROPE_TYPE_ALIASES.get(out["rope_type"], out["rope_type"])
    for field in ROPE_NUMBERS:
        values = out.get(field)
        for value in values if isinstance(values, list | tuple) else [values]:
            if value is not None and not _is_positive(value):
                raise refuse(config, "rope_parameters", f"{field}: a number above 0 is needed")
    return out


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def read_rope(
    config: Any, head_dim: int, *, layer_type: str | None = None, partial: bool = False, types: tuple[str, ...] = ()
) -> RopeSpec:
    """The rotary embedding of a family, checked. `partial`: the family rotates only a part of each head
    (partial_rotary_factor); `types` restricts what it takes."""
    p = rope_parameters(config, layer_type)
    kind = p["rope_type"]
    known = types or tuple(REQUIRED_PARAMETERS)
    if kind not in known:
        raise refuse(config, "rope_parameters", f"unknown rope type {kind!r}; known: {', '.join(known)}")
    missing = [k for k in REQUIRED_PARAMETERS[kind] if p.get(k) is None]
    if missing:
        raise refuse(config, "rope_parameters", f"rope type {kind!r} needs {', '.join(missing)}")
    share = p.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if share != 1.0 and not partial:
        raise refuse(config, "rope_parameters", f"partial_rotary_factor {share} is not part of this family")
    rotary_dim = int(head_dim * share)
    for field in ("short_factor", "long_factor"):
        if kind == "longrope" and len(p[field]) != rotary_dim // 2:
            raise refuse(config, "rope_parameters", f"{field}: have {len(p[field])} numbers, need {rotary_dim // 2}")
    return RopeSpec(
        type=kind,
        theta=float(p["rope_theta"]),
        rotary_dim=rotary_dim,
        max_position=positive(config, "max_position_embeddings"),
        original_max_position=original_max_position(config, p),
        parameters={k: v for k, v in p.items() if k not in ("rope_theta", "rope_type", "type")},
        longest=max_position(config),
    )


def original_max_position(config: Any, parameters: Mapping[str, Any]) -> int:
    """Context length before scaling; a top-level field (Phi 3) wins over the one in the RoPE settings."""
    if getattr(config, "original_max_position_embeddings", None):
        return positive(config, "original_max_position_embeddings")
    value = parameters.get("original_max_position_embeddings")
    return int(value or positive(config, "max_position_embeddings"))


def max_position(config: Any) -> int:
    """The longest context that the config claims.

    `linear` and `dynamic` stretch max_position_embeddings by their factor. `yarn` reaches factor times the original
    length, which newer configs already state as max_position_embeddings. `llama3` and `longrope` configs, and those
    with settings for each layer type, always state the stretched length.
    """
    stated = positive(config, "max_position_embeddings")
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(found.get(t), Mapping) for t in LAYER_TYPES):
        return stated
    p = rope_parameters(config)
    factor = p.get("factor")
    if factor is None or p["rope_type"] not in ("linear", "dynamic", "yarn"):
        return stated
    return max(stated, int(original_max_position(config, p) * factor))
