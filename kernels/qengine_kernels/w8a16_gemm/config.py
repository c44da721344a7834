"""Which kernel runs an 8-bit linear at M rows, and its tiles: pure functions of shapes and chip."""

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
class BytePlan:
    """One launch; a split of K takes `share` tiles of block_k columns."""

    route: Route
    block_m: int
    block_n: int
    block_k: int
    splits: int
    share: int
    num_warps: int
    num_stages: int


def tile_of(block_k: int, in_features: int, most: int) -> int:
    """Columns of a tile: at most `most`, a power of two, and within one block of scales."""
    if block_k >= in_features:
        return most
    return min(most, block_k & -block_k)


def plan_bytes(
    chip: Chip, m: int, n: int, in_features: int, scale_block: int, itemsize: int, route: Route | None = None
) -> BytePlan:
    """The launch for x [m, in_features] of `itemsize` bytes an element, scales by `scale_block` inputs; `route`
    overrides the choice."""
    if route is None:
        few = GEMV_ROWS if chip.tensor_cores else GEMV_ROWS_WITHOUT_TENSOR_CORES
        many = GEMM_ROWS if chip.tensor_cores else few
        route = "gemv" if m <= few else "gemm" if m <= many else "dequantize"
    if route == "dequantize":
        return BytePlan(route, 0, 32, tile_of(scale_block, in_features, 128), 1, 1, 4, 1)
    if route == "gemv":
        block_m, block_n, warps, stages, fill = min(power_of_2(m), GEMV_ROWS), 16, 4, 2, 4
        block_k = tile_of(scale_block, in_features, 256 if block_m == 1 else 128)
    else:
        block_m = min(power_of_2(m, least=16), 64)
        block_n, warps, fill = (128, 8, 2) if block_m == 64 else (64, 4, 2)
        block_k = tile_of(scale_block, in_features, 64 if itemsize == 2 else 32)
        limit = chip.shared_memory
        stages = next(s for s in (4, 3, 2, 1) if shared_bytes(block_m, block_n, block_k, s, itemsize) <= limit)
    programs = ceil_div(n, block_n) * ceil_div(m, block_m)
    blocks = ceil_div(in_features, block_k)
    want = max(1, min(chip.multiprocessors * fill // programs, blocks // 2))
    share = ceil_div(blocks, want)
    return BytePlan(route, block_m, block_n, block_k, ceil_div(blocks, share), share, warps, stages)


def shared_bytes(block_m: int, block_n: int, block_k: int, stages: int, itemsize: int) -> int:
    """An upper estimate of the dot kernel's shared memory: staged codes and x, and two decoded tiles."""
    staged = block_k * block_n + block_m * block_k * itemsize
    return stages * staged + 2 * block_k * block_n * itemsize
