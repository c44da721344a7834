"""Finds plugins by name among the installed distributions' entry points.

Listing reads metadata only: no plugin, no torch and no kernel is imported. A plugin is imported when it is asked for,
so a broken or clashing one matters only to the run that names it. `check_plugins` imports all of them for a report.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback as tracebacks
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, overload

from qengine.errors import PluginError
from qengine.plugin.version import CONTRACT_VERSION, accepts_contract, written_for

if TYPE_CHECKING:
    from qengine.plugin.kernels import WeightKernels
    from qengine.plugin.kv import KVDtype
    from qengine.plugin.weights import WeightQuant

    Loaded = type[WeightQuant] | type[KVDtype] | type[WeightKernels]

Kind = Literal["weight", "kv", "kernels"]
State = Literal["not loaded", "ok", "broken", "other contract", "clash"]

GROUPS: dict[Kind, str] = {
    "weight": "qengine.weight_quant",
    "kv": "qengine.kv_dtype",
    "kernels": "qengine.weight_kernels",
}
OWN_DISTRIBUTION = "qengine-llm"
"""Of the built-in plugins."""
FLAGS: dict[Kind, str] = {"weight": "--quantization", "kv": "--kv-cache-dtype", "kernels": "kernels for"}


@dataclass(frozen=True)
class PluginRecord:
    """One registered plugin. `value` is its entry point ("module:Class"); `contract` the version that it states;
    `error` one line about what is wrong with it and `traceback` that of the exception its import raised; None as long
    as nothing of the kind is known."""

    kind: Kind
    name: str
    distribution: str
    version: str
    value: str
    state: State = "not loaded"
    contract: str | None = None
    error: str | None = None
    traceback: str | None = None

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}"


def list_plugins(kind: Kind | None = None) -> list[PluginRecord]:
    """Every registered plugin of a kind (all when None), sorted by name; nothing is imported.

    Names that two distributions register come back with state "clash", all others with "not loaded". Kernels are named
    like the format that they run, and several may be installed for one.
    """
    return [record for k in _kinds(kind) for record, _ in _found(k)]


def check_plugins(kind: Kind | None = None) -> list[PluginRecord]:
    """Like `list_plugins`, after trying to load each plugin; never raises for a plugin's own fault."""
    checked = []
    for k in _kinds(kind):
        for record, entry in _found(k):
            if record.state == "clash":
                checked.append(record)
                continue
            try:
                loaded = _load(record, entry)
            except PluginError as e:
                checked.append(_faulty(record, e))
            else:
                checked.append(replace(record, state="ok", contract=written_for(loaded.contract)))
    return checked


def find_plugin(kind: Kind, name: str) -> PluginRecord:
    """The record registered as `name`; nothing is imported.

    Raises PluginError when the name is unknown (listing what exists) or registered twice (naming both distributions).
    """
    return _find(kind, name)[0]


@overload
def load_plugin(kind: Literal["weight"], name: str) -> type[WeightQuant]: ...
@overload
def load_plugin(kind: Literal["kv"], name: str) -> type[KVDtype]: ...
def load_plugin(kind: Kind, name: str) -> Loaded:
    """The plugin class registered as `name`.

    Raises PluginError as `find_plugin` does, and when the plugin is broken (with the cause's first line; the cause
    itself is chained) or written for another contract version.
    """
    return _load(*_find(kind, name))


def load_kernels(format: str) -> tuple[list[tuple[PluginRecord, type[WeightKernels]]], list[PluginRecord]]:
    """Other kernels for a weight format, the greatest priority first, and the records of those that do not load."""
    good: list[tuple[PluginRecord, type[WeightKernels]]] = []
    bad = []
    for record, entry in _found("kernels"):
        if record.name == format:
            try:
                good.append((record, _load(record, entry)))  # type: ignore[arg-type]
            except PluginError as e:
                bad.append(_faulty(record, e))
    return sorted(good, key=lambda pair: -pair[1].priority), bad


def _find(kind: Kind, name: str) -> tuple[PluginRecord, metadata.EntryPoint]:
    found = _found(kind)
    hits = [(record, entry) for record, entry in found if record.name == name]
    if not hits:
        names = sorted({record.name for record, _ in found})
        near = difflib.get_close_matches(name, names, 1)
        raise PluginError(
            f"{FLAGS[kind]}: no plugin named {name!r}",
            need=" | ".join(names) or "an installed plugin",
            hint=f"{FLAGS[kind]} {near[0]}" if near else "`qengine plugins` lists what is installed",
        )
    record, entry = hits[0]
    if record.state == "clash":
        raise PluginError(f"{FLAGS[kind]} {name}: {record.error}", hint="uninstall one of them")
    return record, entry


def _kinds(kind: Kind | None) -> Sequence[Kind]:
    return tuple(GROUPS) if kind is None else (kind,)


def _found(kind: Kind) -> list[tuple[PluginRecord, metadata.EntryPoint]]:
    return list(_installed(tuple((folder, _changed(folder)) for folder in sys.path))[kind])


def _changed(folder: str) -> int | None:
    """When something was last put into a folder of sys.path or taken out; None: there is no such folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=1)
def _installed(folders: object) -> dict[Kind, list[tuple[PluginRecord, metadata.EntryPoint]]]:
    """Every registered plugin, read anew when `folders` are others: reading the metadata of some hundred distributions
    takes longer than anything else in the start of a small model, and a start asks a dozen times."""
    entries = metadata.entry_points()
    return {kind: _records(kind, entries.select(group=group)) for kind, group in GROUPS.items()}


def _records(kind: Kind, entries: Iterable[metadata.EntryPoint]) -> list[tuple[PluginRecord, metadata.EntryPoint]]:
    found = []
    for entry in entries:
        dist = entry.dist
        name, version = (dist.name, dist.version) if dist is not None else ("unknown", "?")
        found.append((PluginRecord(kind, entry.name, name, version, entry.value), entry))
    found.sort(key=lambda pair: (pair[0].name, pair[0].distribution))
    counts = Counter(record.name for record, _ in found)
    return [
        (record if counts[record.name] == 1 or kind == "kernels" else _clashing(record, [r for r, _ in found]), entry)
        for record, entry in found
    ]


def _clashing(record: PluginRecord, records: Sequence[PluginRecord]) -> PluginRecord:
    owners = " and ".join(f"{r.origin} ({r.value})" for r in records if r.name == record.name)
    return replace(record, state="clash", error=f"{record.name!r} is registered twice, by {owners}")


def _load(record: PluginRecord, entry: metadata.EntryPoint) -> Loaded:
    where = f"plugin {record.name!r} of {record.origin}"
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as e:  # a plugin that exits at import must not take qengine with it
        raise PluginError(
            f"{where} does not load: {first_line(_root(e))}", hint="`qengine plugins --verbose` shows the traceback"
        ) from e
    _check_contract(record, where, loaded)
    return loaded  # type: ignore[no-any-return]


def _check_contract(record: PluginRecord, where: str, loaded: object) -> None:
    """Raise PluginError unless `loaded` is a class of the right kind that states this contract version."""
    from qengine.plugin.kernels import WeightKernels
    from qengine.plugin.kv import KVDtype
    from qengine.plugin.weights import WeightQuant

    bases: dict[Kind, type] = {"weight": WeightQuant, "kv": KVDtype, "kernels": WeightKernels}
    base = bases[record.kind]
    stated = getattr(loaded, "contract", None)
    if not accepts_contract(stated):
        raise _OtherContract(
            written_for(stated),
            f"{where} was written for another plugin contract",
            have=f"contract {written_for(stated)}" if stated is not None else "no `contract` attribute",
            need=f"contract {CONTRACT_VERSION}",
            hint=f"a release of {record.distribution} made for this qengine",
        )
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise PluginError(f"{where} is not a {base.__name__}", have=record.value, need=f"a subclass of {base.__name__}")


def _faulty(record: PluginRecord, e: PluginError) -> PluginRecord:
    """The record of a plugin that does not load; the traceback is the plugin's own, where it raised one."""
    if isinstance(e, _OtherContract):
        return replace(record, state="other contract", contract=e.stated, error=str(e))
    if e.__cause__ is None:
        return replace(record, state="broken", error=str(e))
    text = "".join(tracebacks.format_exception(e.__cause__))
    return replace(record, state="broken", error=first_line(_root(e)), traceback=text)


class _OtherContract(PluginError):
    """The plugin states another contract version, or none."""

    def __init__(self, stated: str, message: str, **parts: Any) -> None:
        super().__init__(message, **parts)
        self.stated = stated


def _root(e: BaseException) -> BaseException:
    """The exception that a chain of `raise ... from ...` started with."""
    while e.__cause__ is not None:
        e = e.__cause__
    return e


def first_line(e: BaseException) -> str:
    """Type and first line of the message."""
    return f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0]}".rstrip(": ")


def installed_version(distribution: str) -> str | None:
    """None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(distribution: str) -> list[str]:
    """What an installed distribution asks for, such as "torch>=2.11"; nothing when it is not installed."""
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
