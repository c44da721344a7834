"""`qengine tune`: measures tiles of 4-bit linears on this GPU and writes the table that later starts read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qengine.bench.options import TuneOptions, numbers_of, pairs_of
from qengine.config import EngineConfig
from qengine.errors import CapabilityError, ConfigError
from qengine.prepare import prepare_model
from qengine.runtime.decide import decide
from qengine.runtime.tile_tables import table_path
from qengine_kernels.launch import Chip
from qengine_kernels.timing import conditions
from qengine_kernels.wna16_gemm.tile_table import Shape, save
from qengine_kernels.wna16_gemm.tiles import fills_tiles

MOST_PROCESSES = 16


def measure(model: str | None, options: TuneOptions, say: Callable[[str], None]) -> tuple[Path, dict[Shape, list[Any]]]:
    """Returns the file that was written, and what was found for each shape (`qengine_kernels.wna16_gemm.tune.Found`).
    Raises CapabilityError without a GPU whose matrix units Triton reaches, ConfigError where no shape has tiles."""
    if not torch.cuda.is_available():
        raise CapabilityError("tiles are measured on a GPU", have="no CUDA device", need="a GPU of sm_80 or newer")
    chip = Chip.of(torch.device("cuda"))
    gpu = torch.cuda.get_device_name()
    if not chip.tensor_cores:
        raise CapabilityError(
            "4-bit linears have tiles where Triton reaches matrix units", have=f"{gpu} (sm_{chip.sm})",
            need="sm_80 or newer",
        )  # fmt: skip
    pairs = pairs_of(options.shapes) or shapes_of(model, say)
    shapes = tiled_shapes(pairs, options.group_size)
    path = table_path(gpu) if options.output is None else Path(options.output)
    from qengine_kernels.wna16_gemm.tune import tune

    processes = options.processes or min(os.cpu_count() or 1, MOST_PROCESSES)
    found = tune(shapes, numbers_of("--rows", options.rows), say, processes)
    save(path, chip, {shape: [f.entry for f in of] for shape, of in found.items()}, conditions())
    return path, found


def tiled_shapes(pairs: list[tuple[int, int]], group_size: int) -> list[Shape]:
    """Those that tiles fill. Raises ConfigError where there are none."""
    shapes = [(n, k, 0 if group_size >= k else group_size) for n, k in pairs if fills_tiles(k, n, group_size, 4)]
    if not shapes:
        raise ConfigError(
            "no linear of these shapes has tiles", have=", ".join(f"{n}x{k}" for n, k in pairs) or "no linear",
            need=f"outputs and inputs that are multiples of 64, and groups that fit (have {group_size})",
        )  # fmt: skip
    return list(dict.fromkeys(shapes))


def shapes_of(model: str | None, say: Callable[[str], None]) -> list[tuple[int, int]]:
    """(N, K) of the linears of a model that could be quantised, fused as they run."""
    config = prepare_model(EngineConfig(model=model), say)
    leaves = decide(config).model.linears()
    return list(dict.fromkeys((leaf.out_features, leaf.in_features) for leaf in leaves if leaf.quantizable))


def lines(path: Path, found: dict[Shape, list[Any]]) -> list[str]:
    out = ["| N | K | group | up to rows | us | us before |", "|---|---|---|---|---|---|"]
    for (n, k, group), of in found.items():
        out += [f"| {n} | {k} | {group or 'all'} | {f.entry.most} | {f.us:.1f} | {f.used_us:.1f} |" for f in of]
    return [*out, f"Written to {path}"]
