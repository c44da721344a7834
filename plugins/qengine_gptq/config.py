"""GPTQ's own config dict, in the spellings of its writers (AutoGPTQ, GPTQModel, optimum, older ones).

Nothing that only steered the quantiser (damp_percent, dataset, ...) is looked at. What a module really holds is decided
from its tensors; the config says how they are to be read, and is the cross-check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from qengine.plugin.patterns import NameRule, read_dynamic
from qengine_gptq.layout import BITS
from qengine_gptq.zeros import Stored, ZeroRule

FORMATS = ("gptq", "gptq_v2")
WORKS = "need: gptq | gptq_v2; the model quantised again with one of them would work"


@dataclass(frozen=True)
class ModuleConfig:
    """What the config says of one module. None: it doesn't say."""

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    desc_act: bool = False
    static_groups: bool = False
    stored: Stored = "gptq"
    by_word: bool = False
    source: str = "the config"

    @property
    def act_order(self) -> bool:
        """Whether inputs are reordered; with static groups the map is the plain one."""
        return self.desc_act and not self.static_groups

    @property
    def zero_rule(self) -> ZeroRule:
        return ZeroRule(self.stored, self.symmetric, self.by_word)


@dataclass(frozen=True)
class GptqConfig:
    """`base` holds for modules that no rule matches; `in_block` are parts of names of quantised modules inside blocks
    (None: all)."""

    base: ModuleConfig = ModuleConfig()
    rules: tuple[NameRule, ...] = ()
    in_block: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    def matches(self, module: str) -> Iterator[ModuleConfig | None]:
        """What the rules say of a module, the one that counts first; None is "not quantised"."""
        for rule in self.rules:
            if rule.pattern.matches(module):
                if rule.settings is None:
                    yield None
                else:
                    source = f"the dynamic rule {rule.text!r}"
                    yield replace(self.base, **dict(rule.settings), source=source)

    def leaves_out(self, module: str) -> bool:
        """Whether `modules_in_block_to_quantize` leaves this module of a block out."""
        inside = re.search(r"\.\d+\.", module) is not None
        return self.in_block is not None and inside and not any(part in module for part in self.in_block)


def first(config: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    """The first of the spellings that is there with its value; the first name with None otherwise."""
    for key in keys:
        if config.get(key) is not None:
            return key, config[key]
    return keys[0], None


def read_config(config: Mapping[str, Any] | None) -> GptqConfig:
    """Raises ValueError naming field and value for what is not read here."""
    if config is None:
        return GptqConfig()
    key, method = first(config, "method", "quant_method")
    if method is not None and str(method).lower() != "gptq":
        raise ValueError(f"{key} {method!r} is not gptq: these weights are in another format")
    if config.get("is_marlin_format"):
        raise ValueError(f"is_marlin_format is true: weights repacked for Marlin are not read; {WORKS}")
    if config.get("rotation"):
        raise ValueError(
            f"rotation {config['rotation']!r} is not supported by gptq: what enters down_proj would have to be rotated "
            "for each token; need: null; the model quantised again without it would work"
        )
    meta = config.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    base = ModuleConfig(**read_settings(config, ""))
    static = config.get("static_groups", meta.get("static_groups"))
    base = replace(base, static_groups=bool(static), by_word=made_by_gptqmodel(meta.get("quantizer")))
    return GptqConfig(
        base, read_dynamic(config.get("dynamic"), read_settings),
        read_in_block(config.get("modules_in_block_to_quantize")), format_notes(config),
    )  # fmt: skip


def read_settings(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The keyword arguments of a ModuleConfig that `config` states; `prefix` says where it lies, for messages."""
    settings: dict[str, Any] = {}
    key, bits = first(config, "bits", "wbits", "w_bit")
    if bits is not None:
        if isinstance(bits, bool) or bits not in BITS:
            raise ValueError(f"{prefix}{key} {bits!r} is not supported by gptq; need: {' | '.join(map(str, BITS))}")
        settings["bits"] = int(bits)
    key, size = first(config, "group_size", "q_group_size")
    if size is not None:
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"{prefix}{key} {size!r} makes no sense; need: a positive number, or -1 for one group")
        settings["group_size"] = size
    for key, name in (("sym", "symmetric"), ("desc_act", "desc_act")):
        value = config.get(key)
        if value is not None:
            if not isinstance(value, bool):
                raise ValueError(f"{prefix}{key} {value!r} makes no sense; need: true or false")
            settings[name] = value
    stored = read_format(config, prefix)
    if stored is not None:
        settings["stored"] = stored
    pack = config.get("pack_dtype")
    if pack is not None and str(pack).lower().removeprefix("torch.") != "int32":
        raise ValueError(f"{prefix}pack_dtype {pack!r} is not supported by gptq; need: int32")
    return settings


def read_format(config: Mapping[str, Any], prefix: str) -> Stored | None:
    """The zero convention, or None when nothing states it (then it is v1)."""
    stored = None
    for key in ("format", "checkpoint_format"):
        value = config.get(key)
        if value is None:
            continue
        stored = str(value).lower()
        if stored not in FORMATS:
            raise ValueError(f"{prefix}{key} {value!r} is not supported by gptq; {WORKS}")
    return cast("Stored | None", stored)


def format_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    one, other = config.get("checkpoint_format"), config.get("format")
    if one is not None and other is not None and str(one).lower() != str(other).lower():
        notes.append(f"checkpoint_format is {one} and format is {other} in one config: the former counts")
    if config.get("activation"):
        notes.append("activations are kept in 16 bits or more, where the config's activation asks for fewer")
    return tuple(notes)


def read_in_block(value: Any) -> tuple[str, ...] | None:
    """optimum's list of names inside a block, or a list of such lists."""
    if value is None:
        return None
    parts: list[Any] = []
    for item in value if isinstance(value, list) else [value]:
        parts += item if isinstance(item, list) else [item]
    if not isinstance(value, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"modules_in_block_to_quantize {value!r} makes no sense; need: a list of module names")
    return tuple(parts) or None


def made_by_gptqmodel(quantizer: Any) -> bool:
    """`meta.quantizer`: a text or a list of texts such as "gptqmodel:7.6.0"."""
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(name, str) and name.lower().startswith("gptqmodel") for name in names)
