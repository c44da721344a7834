"""Which KV dtype each attention layer gets: the value of --kv-dtype, read.

    fp8                                all layers
    k=fp8_e4m3,v=int4                  keys and values apart
    fp8,layers.0=auto,layers.26-29=auto,layers.3.v=auto,sliding_window=auto
                                       exceptions: layers by number, one side of them, layers with a sliding window

Entries count from left to right, so that later ones overrule earlier ones; what no entry names gets the default dtype.
Names of dtypes are not looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qengine.errors import ConfigError

SIDES = ("k", "v")
PLACE = re.compile(
    r"(?:layers\.(?P<first>\d{1,6})(?:-(?P<last>\d{1,6}))?|(?P<window>sliding_window))(?:\.(?P<side>[kv]))?"
)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
FORM = "NAME, k=NAME, v=NAME, layers.N=NAME, layers.N-M=NAME or sliding_window=NAME (.k or .v behind for one side)"
SKIP_FORM = "layer numbers, N-M or sliding_window, with commas between: 0,29"
SKIP_FLAG = "--kv-cache-dtype-skip-layers"


@dataclass(frozen=True)
class KVEntry:
    """One dtype and where it counts: both sides unless `side` is set; all layers unless `layers` or `windowed` is.
    `skipped`: the value of --kv-cache-dtype-skip-layers, where the entry comes from there."""

    dtype: str
    side: str | None = None
    layers: range | None = None
    windowed: bool = False
    skipped: str | None = None

    @property
    def is_exception(self) -> bool:
        """Whether it names layers."""
        return self.layers is not None or self.windowed

    def covers(self, index: int, windowed: bool, side: str) -> bool:
        if self.side not in (None, side) or (self.windowed and not windowed):
            return False
        return self.layers is None or index in self.layers


@dataclass(frozen=True)
class KVMap:
    """`text` is what it was read from."""

    text: str
    entries: tuple[KVEntry, ...]

    def find(self, index: int, windowed: bool, side: str) -> KVEntry:
        """The entry that counts for one side ("k" or "v") of layer `index`."""
        return next(e for e in reversed(self.entries) if e.covers(index, windowed, side))

    @property
    def dtypes(self) -> list[str]:
        """Every name in it that can count, each once."""
        covered = {
            side: next(i for i in reversed(range(len(self.entries))) if self._is_base(i, side)) for side in SIDES
        }
        first = min(covered.values())
        used = [e.dtype for i, e in enumerate(self.entries) if i >= first and (e.is_exception or i in covered.values())]
        return list(dict.fromkeys(used))

    def _is_base(self, i: int, side: str) -> bool:
        e = self.entries[i]
        return not e.is_exception and e.side in (None, side)

    def check(self, windowed: Iterable[bool]) -> None:
        """Raises ConfigError for exceptions that name no layer of this model, whose layers have a window or not."""
        kinds = list(windowed)
        for e in self.entries:
            said = f"--kv-dtype {self.text}" if e.skipped is None else f"{SKIP_FLAG} {e.skipped}"
            if e.layers is not None and e.layers.stop > len(kinds):
                name = "layers." if e.skipped is None else ""
                raise ConfigError(
                    f"{said}: there is no layer {e.layers.stop - 1}", have=f"{len(kinds)} layers",
                    need=f"{name}0 to {name}{len(kinds) - 1}",
                )  # fmt: skip
            if e.windowed and not any(kinds):
                raise ConfigError(f"{said}: no layer of this model has a sliding window")


def read_kv_map(text: str, default: str, skip: str | None = None) -> KVMap:
    """`default` is for what `text` does not name, and for the layers of `skip` ("0,29,sliding_window"), which counts
    last. Raises ConfigError for anything else than the forms above."""
    entries = [KVEntry(default)]
    for part in text.split(","):
        entries.append(_entry(part.strip(), f"--kv-dtype {text}"))
    shown = text
    if skip is not None:
        skipped = _skipped(skip, default)
        entries += [entry for _, entry in skipped]
        shown += "".join(f",{place}={default}" for place, _ in skipped)
    return KVMap(shown, tuple(entries))


def _skipped(skip: str, default: str) -> list[tuple[str, KVEntry]]:
    """(place, entry) of each part of --kv-cache-dtype-skip-layers."""
    parts = [part for part in skip.replace(" ", ",").split(",") if part]
    if not parts:
        raise ConfigError(f"{SKIP_FLAG} {skip!r} names no layers", need=SKIP_FORM)
    out = []
    for part in parts:
        place = f"layers.{part}" if part[0].isdigit() else part
        try:
            entry = _entry(f"{place}={default}", SKIP_FLAG)
        except ConfigError as e:
            raise ConfigError(f"{SKIP_FLAG} {skip}: {part!r} names no layers", need=SKIP_FORM) from e
        if not entry.is_exception:
            raise ConfigError(f"{SKIP_FLAG} {skip}: {part!r} names no layers", need=SKIP_FORM)
        out.append((place, replace(entry, skipped=skip)))
    return out


def _entry(part: str, flag: str) -> KVEntry:
    place, equals, name = part.rpartition("=")
    if NAME.fullmatch(name) is None or (equals and not place):
        raise ConfigError(f"{flag}: {part!r} is no KV dtype", need=FORM)
    if not equals:
        return KVEntry(name)
    if place in SIDES:
        return KVEntry(name, place)
    match = PLACE.fullmatch(place)
    if match is None:
        raise ConfigError(f"{flag}: {place!r} names no layers", need=FORM)
    if match["window"]:
        return KVEntry(name, match["side"], windowed=True)
    first = int(match["first"])
    last = int(match["last"] or first)
    if last < first:
        raise ConfigError(f"{flag}: {place!r} ends before it begins", need=FORM)
    return KVEntry(name, match["side"], range(first, last + 1))
