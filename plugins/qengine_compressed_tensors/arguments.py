"""How one tensor of a compressed-tensors scheme is quantised: the `QuantizationArgs` of its config, checked.

Every field of every known version is read here or known to say nothing about the stored bytes; anything else is
refused by name, since a field that is passed over may change what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Strategy = Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"]

STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
ACTORDER = {"weight": None, "static": None, "none": None, "group": "group", "dynamic": "group"}
"""`weight` and `static` order the calibration only; with `group` the file holds weight_g_idx."""

CALIBRATION_ONLY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields about how values were found or in which dtype they are stored (the tensors' headers say that)."""


@dataclass(frozen=True)
class Args:
    """One tensor's quantisation. `dynamic` is "local" for NVFP4's activations; `group_size` is None but for strategy
    group and tensor_group, `block` (outputs, inputs) but for strategy block. `actorder`: "group" or None."""

    bits: int
    type: Literal["int", "float"]
    symmetric: bool
    strategy: Strategy
    group_size: int | None
    block: tuple[int, int] | None
    dynamic: bool | Literal["local"]
    actorder: Literal["group"] | None

    def __str__(self) -> str:
        size = f" {self.group_size}" if self.group_size else "x".join(map(str, self.block or ()))
        kind = "dynamic " if self.dynamic else ""
        return f"{kind}{self.type}{self.bits} per {self.strategy}{size}" + ("" if self.symmetric else ", asymmetric")


def read_args(where: str, raw: Any) -> Args | None:
    """`raw` is the JSON value at `where` ("config_groups.group_0.weights"); None when nothing is quantised there.

    Raises ValueError naming field and value.
    """
    if raw is None:
        return None
    raw = as_mapping(where, raw)
    known = {
        "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
        *CALIBRATION_ONLY,
    }  # fmt: skip
    refuse_unknown(where, raw, known)
    bits = raw.get("num_bits", 8)
    if not is_int(bits) or not 1 <= bits <= 16:
        raise ValueError(f"{where}.num_bits {short(bits)} makes no sense; need: a number of bits such as 4 or 8")
    kind = lower(where, raw, "type", "int")
    if kind not in ("int", "float"):
        raise ValueError(f"{where}.type {short(raw['type'])} is not known; need: int or float")
    symmetric = raw.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ValueError(f"{where}.symmetric {short(symmetric)} makes no sense; need: true or false")
    group_size = read_group_size(where, raw.get("group_size"))
    strategy = read_strategy(where, raw, group_size)
    return Args(
        bits,
        kind,  # type: ignore[arg-type]
        symmetric,
        strategy,
        group_size if strategy in ("group", "tensor_group") else None,
        read_block(where, raw.get("block_structure"), strategy),
        read_dynamic(where, raw.get("dynamic", False)),
        read_actorder(where, raw.get("actorder")),
    )


def read_group_size(where: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_int(value) or (value < 1 and value not in (0, -1)):
        raise ValueError(f"{where}.group_size {short(value)} makes no sense; need: a positive number or -1")
    return int(value)


def read_strategy(where: str, raw: Mapping[str, Any], group_size: int | None) -> Strategy:
    """The stated strategy, or what the group size means where none is stated."""
    strategy = lower(where, raw, "strategy", None)
    if strategy is None:
        strategy = "tensor" if not group_size else "group" if group_size > 0 else "channel"
    if strategy not in STRATEGIES:
        raise ValueError(f"{where}.strategy {short(raw['strategy'])} is not known; need: {' | '.join(STRATEGIES)}")
    grouped = strategy in ("group", "tensor_group")
    if grouped and not (group_size and group_size > 0):
        raise ValueError(f"{where}.strategy {strategy} needs a positive group_size, have: {group_size}")
    if not grouped and group_size and group_size > 0:
        raise ValueError(f"{where}.group_size {group_size} contradicts its strategy {strategy}")
    return strategy  # type: ignore[return-value]


def read_block(where: str, value: Any, strategy: str) -> tuple[int, int] | None:
    if isinstance(value, str):  # "128x128" in old files
        parts = value.lower().split("x")
        value = [int(p) if p.strip().isdecimal() else p for p in parts]
    if value is None and strategy != "block":
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(is_int(v) and v > 0 for v in value):
        raise ValueError(f"{where}.block_structure {short(value)} makes no sense; need: two positive numbers")
    if strategy != "block":
        raise ValueError(f"{where}.block_structure {value} contradicts its strategy {strategy}")
    return (value[0], value[1])


def read_dynamic(where: str, value: Any) -> bool | Literal["local"]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() == "local":
        return "local"
    raise ValueError(f"{where}.dynamic {short(value)} is not known; need: true, false or local")


def read_actorder(where: str, value: Any) -> Literal["group"] | None:
    if value is None or isinstance(value, bool):
        return "group" if value else None
    if not isinstance(value, str) or value.lower() not in ACTORDER:
        raise ValueError(f"{where}.actorder {short(value)} is not known; need: {' | '.join(ACTORDER)} or null")
    return ACTORDER[value.lower()]  # type: ignore[return-value]


def as_mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} {short(value)} makes no sense; need: a JSON object")
    return value


def refuse_unknown(where: str, raw: Mapping[str, Any], known: set[str]) -> None:
    """Null, empty and false values of unknown fields ask for nothing."""
    for key, value in raw.items():
        if key not in known and value not in (None, False, {}, [], ""):
            raise ValueError(f"{where}.{key} {short(value)} is not known to compressed-tensors as read here")


def lower(where: str, raw: Mapping[str, Any], key: str, default: str | None) -> str | None:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{where}.{key} {short(value)} makes no sense; need: a word")
    return value.lower()


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
