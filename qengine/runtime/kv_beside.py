"""Which calibration file counts for a model: the one that was named, the one beside the model, or one of those that
serving measured itself.

What serving measures lies in a folder of its own for every KV dtype or map (`own_folder`), so that no start writes over
what another one measured, or over what `qengine calibrate` put beside the model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from qengine.config import EngineConfig
from qengine.core.kv_map import SIDES, KVMap
from qengine.errors import CheckpointError
from qengine.plugin.discovery import load_plugin
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.kv_dtypes import asked_kv_dtypes, scaled_kv_dtypes
from qengine.runtime.kv_sidecar import TENSORS, KVSidecar, read_sidecar

OWN = "kv_scales"


def own_folder(model: Path, kv_dtype: str) -> Path:
    """Where serving keeps the scales that it measured for this value of --kv-dtype. Spellings of one dtype (fp8 and
    fp8_e4m3) share a folder; a map that names layers is named by a hash."""
    asked = asked_kv_dtypes(kv_dtype)
    entries = [(load_plugin("kv", e.dtype).name, e) for e in asked.entries]
    base = {side: [n for n, e in entries if not e.is_exception and e.side in (None, side)][-1] for side in SIDES}
    name = base["k"] if base["k"] == base["v"] else f"k={base['k']},v={base['v']}"
    if any(e.is_exception for e in asked.entries):
        facts = [(n, e.side, e.layers, e.windowed) for n, e in entries]
        name += "-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return model / OWN / name


def choose_sidecar(
    place: str | None, kv_dtype: str, checkpoint: Checkpoint
) -> tuple[KVSidecar | None, list[str]]:
    """The calibration file for --kv-scales `place` and --kv-dtype `kv_dtype`, and notes on one that is passed over.

    Without `place`: the one beside the model where it was measured for this KV dtype; else the one that serving
    measured for it; else the one beside the model, which may be for another KV dtype.

    Raises CheckpointError for one that counts and is damaged or made for another model; with the default KV dtype,
    which needs none, that is a note.
    """
    if place is not None:
        return read_sidecar(place, checkpoint), []
    asked = asked_kv_dtypes(kv_dtype)
    own = own_folder(checkpoint.folder, kv_dtype)
    measured = (own / TENSORS).is_file()
    try:
        beside = read_sidecar(None, checkpoint)
        if measured and (beside is None or not is_measured_for(beside, asked)):
            return read_sidecar(own, checkpoint), []
        return beside, []
    except CheckpointError as e:
        if asked.dtypes == [EngineConfig.kv_cache_dtype]:
            return None, [f"KV scales beside the model are passed over, as KV dtype {kv_dtype} needs none: {e}"]
        if not measured:
            raise
        return read_sidecar(own, checkpoint), [f"KV scales in {own} are used, not those beside the model: {e}"]


def is_measured_for(sidecar: KVSidecar, asked: KVMap) -> bool:
    """Whether it was measured for every KV dtype with scales that `asked` gives K or V of some layer."""
    return all({p.name for p in scaled_kv_dtypes(asked, side)} <= sidecar.measured(side) for side in SIDES)
