"""From a finished run to what a user keeps: a quantised folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.checkpoint_writer import CheckpointWriter, write_json
from qengine_calibration.work import WorkFolder

REPORT, KV_REPORT = "calibration.json", "kv_calibration.json"
"""What was measured while a copy was made, and while KV scales alone were; beside the result."""


def write_copy(
    checkpoint: Checkpoint, work: WorkFolder, folder: Path, config: dict[str, Any], copied: list[Path],
    skip: frozenset[str] = frozenset(), extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fill `folder` with the checkpoint, the run's tensors in place of those they replace, in file order.

    `config` is its config.json, `copied` are files that come along; `skip` are tensors of the checkpoint that are
    left out, `extra` ones that are added.
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
    for name, value in (extra or {}).items():
        writer.put(name, value)
    writer.finish()
    write_json(folder / "config.json", config)
    for path in copied:
        shutil.copyfile(path, folder / path.name)
