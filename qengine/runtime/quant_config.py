"""Finds a checkpoint's quantisation config in all the places where writers have put it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qengine.errors import CheckpointError
from qengine.runtime.weight_files import read_json

KEYS: tuple[tuple[str, str | None], ...] = (("quantization_config", None), ("compression_config", "compressed-tensors"))
"""Keys of config.json, and the method that a value means when it names none; llm-compressor's first key was
compression_config."""

LEGACY_FILES: tuple[tuple[str, str | None], ...] = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)
"""Files beside config.json, and the method that a file of that name means when it names none (ModelOpt; AutoGPTQ and
GPTQModel; AutoAWQ before 0.2)."""

SPELLINGS = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format"),
    **{field: (field,) for field in ("version", "sym", "zero_point", "desc_act", "static_groups", "dynamic", "meta")},
}
"""Fields that say how tensors are to be read, in the spellings of different writers. Two homes of one config must agree
on them; where one is silent, the other is listened to."""


@dataclass(frozen=True)
class QuantConfig:
    """A quantisation config as written, its method and where it was found ("config.json quantization_config")."""

    method: str
    config: dict[str, Any]
    source: str


def find_quant_config(folder: Path, raw_config: Mapping[str, Any]) -> tuple[QuantConfig | None, list[str]]:
    """The config that counts (config.json first, then its text_config, then legacy files), with what only others of the
    same method state, and notes on those and on others that disagree with it.

    Raises CheckpointError for a config that names no method or is no JSON object.
    """
    homes: list[tuple[str, Any, str | None]] = []
    text = raw_config.get("text_config")
    for key, method in KEYS:
        homes.append((f"config.json {key}", raw_config.get(key), method))
        if isinstance(text, Mapping):
            homes.append((f"config.json text_config.{key}", text.get(key), method))
    for name, method in LEGACY_FILES:
        if (folder / name).is_file():
            homes.append((name, read_json(folder / name), method))
    found = [_named(source, value, method) for source, value, method in homes if value]
    if not found:
        return None, []
    notes = [note for other in found[1:] for note in _differences(found[0], other)]
    return _completed(found, notes), notes


def _completed(found: list[QuantConfig], notes: list[str]) -> QuantConfig:
    """The first of `found` with the fields that only later ones of its method state; adds a note for each."""
    first, config = found[0], dict(found[0].config)
    for other in found[1:]:
        if other.method != first.method:
            continue
        for field, spellings in SPELLINGS.items():
            stated = [s for s in spellings if other.config.get(s) is not None]
            if stated and all(config.get(s) is None for s in spellings):
                config[stated[0]] = other.config[stated[0]]
                notes.append(f"{first.source} says nothing of {field}: {other.source} counts")
    return replace(first, config=config)


def _named(source: str, value: Any, method: str | None) -> QuantConfig:
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} is not a JSON object", have=repr(value)[:80])
    name = value.get("quant_method") or method
    if not isinstance(name, str):
        raise CheckpointError(f"{source} names no quant_method", have=", ".join(value))
    return QuantConfig(name.lower(), value, source)


def _differences(chosen: QuantConfig, other: QuantConfig) -> list[str]:
    notes = []
    if other.method != chosen.method:
        notes.append(f"{other.source} says {other.method}, {chosen.source} says {chosen.method}: the latter counts")
        return notes
    for field, spellings in SPELLINGS.items():
        values = [next((c.config[s] for s in spellings if c.config.get(s) is not None), None) for c in (chosen, other)]
        plain = not any(value is None or isinstance(value, dict) for value in values)
        if plain and str(values[0]).lower() != str(values[1]).lower():
            notes.append(
                f"{field} is {values[0]} in {chosen.source} and {values[1]} in {other.source}: the former counts"
            )
    return notes
