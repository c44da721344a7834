"""Tables of tiles that were measured on a machine: a JSON object with the chip, what it was measured with, and for each
(N, K, group) the entries that `tiled_config` takes instead of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path

from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm.tiled_config import TUNED, Entry

Shape = tuple[int, int, int]
"""N, K and group (0: one for all of K) of a 4-bit weight."""


def save(path: Path, chip: Chip, tables: Mapping[Shape, Sequence[Entry]], measured: Mapping[str, str]) -> None:
    """`measured`: the device's name and versions, as text for reports. Entries ascend by their number of rows."""
    value = {
        "chip": asdict(chip),
        "measured": dict(measured),
        "tables": [
            {"n": n, "k": k, "group": group, "entries": [list(astuple(entry)) for entry in entries]}
            for (n, k, group), entries in tables.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def use(path: Path, chip: Chip) -> str:
    """Take a table for every launch on `chip` from now on. Returns what it is, for a report. Raises ValueError for a
    file that is no such table, or one of another chip."""
    try:
        value = json.loads(path.read_text())
        found = Chip(**value["chip"])
        tables = {
            (found, int(t["n"]), int(t["k"]), int(t["group"])): tuple(Entry(*entry) for entry in t["entries"])
            for t in value["tables"]
        }
        about = ", ".join(f"{name} {text}" for name, text in value["measured"].items())
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is no table of tiles: {type(e).__name__} {e}") from e
    if found != chip:
        raise ValueError(f"{path} is of another chip: have {found}, this one is {chip}")
    TUNED.update(tables)
    return f"{len(tables)} shapes measured here ({about}; {path})"
