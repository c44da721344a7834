"""Tiles of the grouped GEMM, and when an expert's own GEMM is the better one: pure functions of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass

from qengine_kernels.launch import Chip, ceil_div, power_of_2

FEW_TOKENS = 4
"""Up to so many tokens, and always without tensor cores, rows are multiplied and added, not put into `tl.dot`."""
ROWS_EACH = 256
ROWS_EACH_WITHOUT_TENSOR_CORES = 16
"""Rows of an average expert up to which the grouped kernel runs; above, a library GEMM for each expert."""


@dataclass(frozen=True)
class GroupedPlan:
    """One launch. `block_w` counts stored rows of the weight (a word row has several weight rows)."""

    dot: bool
    block_m: int
    block_n: int
    block_w: int
    num_warps: int
    num_stages: int


def most_pairs(chip: Chip, experts: int) -> int:
    """Pairs of a call above which the experts should run one by one."""
    return experts * (ROWS_EACH if chip.tensor_cores else ROWS_EACH_WITHOUT_TENSOR_CORES)


def describe(kernel: str, limit: int) -> str:
    """For the start-up report: how the linears of experts run that are grouped up to `limit` pairs."""
    return f"{kernel}, all experts at once up to {limit:,} (token, expert) pairs"


def row_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles of rows at most, however the pairs fall on the experts; known without asking the device."""
    busy = min(experts, pairs)
    return (pairs - busy) // block_m + busy


def within_group(block_w: int, group_size: int | None) -> int:
    """A tile of at most `block_w` inputs that lies within one group of scales, where that is not too small a tile."""
    least = 32
    aligned = block_w if group_size is None else group_size & -group_size
    return min(block_w, aligned) if aligned >= least else block_w


def plan_grouped(
    chip: Chip,
    pairs: int,
    top_k: int,
    experts: int,
    n: int,
    slots: int,
    itemsize: int,
    stored: int,
    group_size: int | None = None,
) -> GroupedPlan:
    """The launch for `pairs` rows. `itemsize` is the bytes of an element of x, `stored` those of one of the weight,
    which holds `slots` values; `group_size` inputs share a scale (None: all do, or there are none)."""
    tokens = pairs // top_k  # an expert gets each token once at most
    if tokens <= FEW_TOKENS or not chip.tensor_cores:
        block_m = min(power_of_2(tokens), FEW_TOKENS)
        if slots > 1:
            block_n = 64 if block_m == FEW_TOKENS else 128
            while block_n > 32 and ceil_div(n, block_n) * row_tiles(pairs, experts, block_m) < 2 * chip.multiprocessors:
                block_n //= 2
            return GroupedPlan(False, block_m, block_n, 16, 4, 2)
        return GroupedPlan(False, block_m, 16, within_group(256 // block_m, group_size), 4, 2)
    mean = ceil_div(pairs, min(experts, pairs))
    block_m = min(power_of_2(mean, least=16), 64)
    block_n, warps = (128, 8) if block_m == 64 else (64, 4)
    block_w = 16 if slots > 1 else within_group(32 if itemsize == 4 else 64, group_size)
    tile = (block_m, block_n, block_w)
    choices = (4, 3, 2, 1) if slots == 1 else (3, 2, 1)
    stages = next(s for s in choices if shared_bytes(*tile, s, slots, itemsize, stored) <= chip.shared_memory)
    return GroupedPlan(True, *tile, warps, stages)


def shared_bytes(
    block_m: int, block_n: int, block_w: int, stages: int, slots: int, itemsize: int, stored: int
) -> int:
    """An upper estimate of the dot kernel's shared memory: staged weights and slices of x, and two decoded slices."""
    staged = stored * block_w * block_n + slots * block_m * block_w * itemsize
    return stages * staged + 2 * block_w * block_n * itemsize
