"""From a finished run to what a user keeps: a quantised folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.checkpoint_writer import CheckpointWriter, write_json
from qengine_calibration.work import WorkFolder

REPORT = "calibration.json"
"""What was measured while a copy was made; lies beside its config.json."""


def write_copy(
    checkpoint: Checkpoint, work: WorkFolder, folder: Path, config: dict[str, Any], copied: list[Path],
    skip: frozenset[str] = frozenset(),
) -> None:
    """Fill `folder` with the checkpoint, the run's tensors in place of those they replace, in file order.

    `config` is its config.json, `copied` are files that come along, `skip` tensors that are left out (KV scales that
    are written elsewhere).
    """
    headers = [work.tensors(i) for i in range(work.done)]
    instead: dict[str, list[tuple[int, str]]] = {}
    for i in range(work.done):
        for name, new in work.facts(i).get("replaced", {}).items():
            instead[name] = [(i, n) for n in new]
    writer = CheckpointWriter(folder)
    for name in sorted(checkpoint.tensors, key=checkpoint.file_position):
        if name in skip:
            continue
        if name not in instead:
            writer.put(name, checkpoint.read(name))
        for i, new in instead.get(name, []):
            writer.put(new, work.read(headers[i], new))
    used = {n for parts in instead.values() for _, n in parts}
    for i, header in enumerate(headers):
        for name in header.tensors:
            if name not in used and name not in skip:
                writer.put(name, work.read(headers[i], name))
    writer.finish()
    write_json(folder / "config.json", config)
    for path in copied:
        shutil.copyfile(path, folder / path.name)
