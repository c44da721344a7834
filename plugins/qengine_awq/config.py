"""AWQ's own config dict, in the spellings of its writers.

AutoAWQ up to 0.1.8 wrote `w_bit`, `q_group_size` and an upper-case version; GPTQModel and transformers 5 write the
version as `format` or `checkpoint_format`; transformers 4 wrote `backend: "llm-awq"` for MIT's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qengine_awq.layouts import LAYOUTS

STATED = tuple(dict.fromkeys(value for layout in LAYOUTS for value in layout.stated))
"""What `version` and its other spellings may say."""


@dataclass(frozen=True)
class AwqConfig:
    """`group_size` and `zero_point` are None when nothing states them (no config at all): the tensors tell.

    `layouts` are (field, value) of all that name a layout, the values in lower case.
    """

    group_size: int | None = None
    zero_point: bool | None = None
    skipped: tuple[str, ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()


def first(config: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    """The first of the spellings that is there with its value; the last with None otherwise."""
    for key in keys:
        if config.get(key) is not None:
            return key, config[key]
    return keys[-1], None


def read_config(config: Mapping[str, Any] | None) -> AwqConfig:
    """Raises ValueError naming field and value for what is not read here."""
    if config is None:
        return AwqConfig()
    layouts = read_layouts(config)
    key, bits = first(config, "w_bit", "bits")
    if bits is not None and (bits != 4 or isinstance(bits, bool)):
        raise ValueError(f"{key} {bits!r} is not supported by awq; AWQ's layouts hold 4-bit weights, need: 4")
    key, group_size = first(config, "q_group_size", "group_size")
    if group_size is not None and (
        not isinstance(group_size, int) or isinstance(group_size, bool) or (group_size < 1 and group_size != -1)
    ):
        raise ValueError(f"{key} {group_size!r} makes no sense; need: a positive number, or -1 for one group")
    zero_point = config.get("zero_point")
    if zero_point is not None and not isinstance(zero_point, bool):
        raise ValueError(f"zero_point {zero_point!r} makes no sense; need: true or false")
    skipped = config.get("modules_to_not_convert") or ()
    if not isinstance(skipped, list | tuple) or not all(isinstance(s, str) for s in skipped):
        raise ValueError(f"modules_to_not_convert {skipped!r} makes no sense; need: a list of module names")
    return AwqConfig(group_size, zero_point, tuple(skipped), layouts)


def read_layouts(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Every field that names a layout; refuses unknown names and other methods."""
    key, method = first(config, "method", "quant_method")
    if method is not None and str(method).lower() not in ("awq", "auto_awq"):
        raise ValueError(f"{key} {method!r} is not awq: these weights are in another format")
    found = []
    for key in ("version", "format", "checkpoint_format"):
        value = config.get(key)
        if value is None:
            continue
        if str(value).lower() not in STATED:
            raise ValueError(f"{key} {value!r} is not supported by awq; need: {' | '.join(STATED)}")
        found.append((key, str(value).lower()))
    backend = str(config.get("backend") or "").lower()
    if backend in STATED:  # most backends are kernels, which say nothing about the file
        found = [("backend", backend)]
    return tuple(found)
