"""Whether this process has the kernels, and for what."""

from __future__ import annotations

from pathlib import Path

import torch

from qengine_kernels.cpu_fused.loading import Kernels, Loaded, compile_kernels

FLOATS = {torch.float32: False, torch.bfloat16: True}
"""Dtypes that the kernels read and write; how they are told which."""
FEW_ROWS = 32
MORE_ROWS = 128
COULD_WIN = 3
"""The kernels run on one thread: they are used up to MORE_ROWS rows (tokens of a step) where torch has fewer than
COULD_WIN threads, else up to FEW_ROWS. Measured with 1 to 128 rows (2 cores with AVX-512; 9 heads of 64 with 3 KV heads
and 32 of 128 with 8; 60 to 2000 cached tokens): attention takes 0.35 to 0.7 of torch's time on one thread, 0.35 to 1.0
of that on two; norms 0.3 to 0.6, activations the same. More threads could win, with many rows."""

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


def most_rows() -> int:
    """For how many rows the kernels are used."""
    return MORE_ROWS if torch.get_num_threads() < COULD_WIN else FEW_ROWS
