"""Tiles of 4-bit linears that `qengine tune` has measured on this machine: where they lie, and taking them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from qengine.errors import ConfigError
from qengine.runtime.cache_dir import cache_root
from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm.tile_table import use


def table_path(gpu: str) -> Path:
    """The table of a GPU of this name."""
    return cache_root() / "tiles" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def take_table(device: torch.device, gpu: str) -> str:
    """A report line: the table that launches read from now on. Raises ConfigError for a table that is broken or of
    another chip."""
    path = table_path(gpu)
    if not path.is_file():
        return "Tiles of 4-bit linears: built in (`qengine tune` measures others for this GPU)"
    try:
        return f"Tiles of 4-bit linears: {use(path, Chip.of(device))}"
    except ValueError as e:
        hint = "`qengine tune` makes a new one; without the file the built-in tiles are used"
        raise ConfigError(str(e), hint=hint) from e
