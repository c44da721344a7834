"""Decides which weight plugin reads a checkpoint: what its config says, cross-checked with what the user asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qengine.errors import CheckpointError, ConfigError, PluginError
from qengine.plugin import WeightQuant
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime.quant_config import QuantConfig

DENSE = "dense"

Load = Callable[[str], type[WeightQuant]]
Names = Callable[[], Sequence[str]]


@dataclass(frozen=True)
class QuantChoice:
    """The plugin that reads quantised modules (None: all modules are 16-bit), the one for 16-bit modules, and a line
    for the start-up report."""

    quant: WeightQuant | None
    dense: WeightQuant
    reason: str

    def over_plain_weights(self) -> QuantChoice:
        """The same where what the config calls quantised turned out to be stored in 16 bits."""
        return replace(self, reason=f"16-bit, against what the config says ({self.reason})")


def _load(name: str) -> type[WeightQuant]:
    return load_plugin("weight", name)


def _names() -> list[str]:
    return [plugin.name for plugin in list_plugins("weight")]


def select_quant(
    flag: str | None, stored: QuantConfig | None, *, load: Load = _load, names: Names = _names
) -> QuantChoice:
    """`flag` is --quantization; `stored` is what the checkpoint says about itself. `load` and `names` find plugins.

    Raises ConfigError when both are given and contradict each other (naming both), PluginError for an unknown or
    broken plugin, CheckpointError when no plugin reads the checkpoint's method or the plugin refuses its config.
    """
    asked = load(flag) if flag is not None else None
    dense = load(DENSE).parse(None)
    if stored is None:
        if asked is None or flag == DENSE:
            return QuantChoice(None, dense, "16-bit: the checkpoint has no quantization_config")
        quant = _parse(asked, None, f"--quantization {flag}")
        return QuantChoice(quant, dense, f"{flag}: asked for; the checkpoint has no quantization_config")
    if asked is not None and stored.method not in _methods(asked, flag):
        raise ConfigError(
            f"--quantization {flag} contradicts the checkpoint",
            have=f"{stored.method} ({stored.source})", need=flag,
            hint="leave --quantization out to use the checkpoint's own format",
        )
    plugin = asked if asked is not None else _reader(stored, load, names)
    return QuantChoice(_parse(plugin, stored.config, stored.source), dense, f"{stored.method}: {stored.source}")


def _methods(plugin: type[WeightQuant], name: str | None) -> set[str]:
    return {m for m in (plugin.name, name, *plugin.methods) if m}


def _reader(stored: QuantConfig, load: Load, names: Names) -> type[WeightQuant]:
    """The plugin named like the method, else the one that lists it among its methods."""
    known = sorted(set(names()))
    if stored.method in known:
        return load(stored.method)
    readers = {}
    for name in known:
        try:
            plugin = load(name)
        except PluginError:
            continue  # a broken plugin matters only to those who ask for it
        if stored.method in plugin.methods:
            readers[name] = plugin
    if len(readers) > 1:
        raise PluginError(
            f"several installed plugins read {stored.method!r} ({stored.source}): {', '.join(readers)}",
            hint=" or ".join(f"--quantization {name}" for name in readers),
        )
    if readers:
        return next(iter(readers.values()))
    raise CheckpointError(
        f"no installed plugin reads this checkpoint's weight format ({stored.source})",
        have=stored.method, need=" | ".join(known), hint="a plugin for it, or another copy of the model",
    )


def _parse(plugin: type[WeightQuant], config: Mapping[str, Any] | None, source: str) -> WeightQuant:
    try:
        return plugin.parse(config)
    except ValueError as e:
        raise CheckpointError(f"{source}: {e}") from e
