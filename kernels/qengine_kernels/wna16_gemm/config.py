"""Which kernel runs a linear over packed codes at M rows, and its tiles: pure functions of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qengine_kernels.launch import Chip, ceil_div, power_of_2

Route = Literal["gemv", "gemm", "dequantize"]

GEMV_ROWS = 4
GEMV_ROWS_WITHOUT_TENSOR_CORES = 16
GEMM_ROWS = 256
"""Up to how many rows of x each route is taken; above, the weight is dequantised for a library GEMM."""

SCRATCH_BYTES = 64 * 1024 * 1024
"""Most bytes of dense weight that the dequantise route holds at a time (it goes through N in chunks)."""


@dataclass(frozen=True)
class GemmPlan:
    """One launch. `block_w` counts word rows (as many weight rows each as a word has slots), a multiple of the layout's
    slice; `share` is a split's word rows."""

    route: Route
    block_m: int
    block_n: int
    block_w: int
    splits: int
    share: int
    num_warps: int
    num_stages: int


def grouping(group_size: int, in_features: int, slice_rows: int, block_w: int, slots: int = 8) -> int:
    """How often a block of words needs new scales: 0 once, 1 by word row, 2 by slot, 3 by word row and slot."""
    if group_size >= in_features or group_size % (slots * block_w) == 0:
        return 0
    if group_size % (slots * slice_rows) == 0:
        return 1
    return 2 if slice_rows == block_w and group_size % slice_rows == 0 else 3


def plan_gemm(
    chip: Chip, m: int, n: int, in_features: int, itemsize: int, route: Route | None = None, slots: int = 8
) -> GemmPlan:
    """The launch for x [m, in_features] of `itemsize` bytes an element and words of `slots` codes; `route` overrides
    the choice."""
    word_rows = ceil_div(in_features, slots)
    if route is None:
        few = GEMV_ROWS if chip.tensor_cores else GEMV_ROWS_WITHOUT_TENSOR_CORES
        many = GEMM_ROWS if chip.tensor_cores else few
        route = "gemv" if m <= few else "gemm" if m <= many else "dequantize"
    if route == "dequantize":
        return GemmPlan(route, 0, 64, 16, 1, word_rows, 4, 1)
    if route == "gemv":
        block_m = min(power_of_2(m), GEMV_ROWS)
        tile = (block_m, 128 if block_m < 4 else 64, 16, 4, 2)
        fill = 4
    else:
        block_m = min(power_of_2(m, least=16), 64)
        block_n, warps = (128, 8) if block_m == 64 else (64, 4)
        limit = chip.shared_memory
        stages = next(s for s in (3, 2, 1) if shared_bytes(block_m, block_n, 16, s, itemsize, slots) <= limit)
        tile = (block_m, block_n, 16, warps, stages)
        fill = 2
    block_m, block_n, block_w, warps, stages = tile
    programs = ceil_div(n, block_n) * ceil_div(m, block_m)
    blocks = ceil_div(word_rows, block_w)
    want = max(1, min(chip.multiprocessors * fill // programs, blocks // 2))
    share = ceil_div(blocks, want) * block_w
    return GemmPlan(route, block_m, block_n, block_w, ceil_div(word_rows, share), share, warps, stages)


def shared_bytes(block_m: int, block_n: int, block_w: int, stages: int, itemsize: int, slots: int = 8) -> int:
    """An upper estimate of the dot kernel's shared memory: staged words and slices of x, and two decoded slices."""
    staged = 4 * block_w * block_n + slots * block_m * block_w * itemsize
    return stages * staged + 2 * block_w * block_n * itemsize
