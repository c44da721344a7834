"""Whether this process has the kernels, and for what."""

from __future__ import annotations

from pathlib import Path

import torch

from qengine_kernels.cpu_fused.loading import Kernels, Loaded, compile_kernels

FLOATS = {torch.float32: False, torch.bfloat16: True}
"""Dtypes that the kernels read and write; how they are told which."""
FEW_ROWS = 32
"""Up to this many rows (tokens of a step) the kernels are used. They run on one thread, and their time grows with the
rows, while single torch operations cost their calls, and large ones run on all threads."""

_loaded: Loaded | None = None


def prepare(folder: Path | None) -> str:
    """Make the kernels ready, once a process; returns a line for the start-up report. `folder`: see
    `loading.compile_kernels`."""
    global _loaded
    if _loaded is None:
        _loaded = compile_kernels(folder)
    return _loaded.line


def loaded() -> Kernels | None:
    """None until `prepare` has been called, and where it found that there are none."""
    return None if _loaded is None else _loaded.kernels
