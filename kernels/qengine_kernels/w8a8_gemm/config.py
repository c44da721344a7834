"""Tiles of the 8-bit by 8-bit kernel: a pure function of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass

from qengine_kernels.launch import Chip, ceil_div, power_of_2
from qengine_kernels.w8a16_gemm.config import tile_of


@dataclass(frozen=True)
class PairPlan:
    """One launch; a split of K takes `share` tiles of block_k columns."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    share: int
    num_warps: int
    num_stages: int


def plan_pair(chip: Chip, m: int, n: int, in_features: int, scale_block: int, native: bool) -> PairPlan:
    """The launch for codes [m, in_features] and scales by `scale_block` inputs."""
    block_m = min(power_of_2(m, least=16), 128)
    block_n, warps = (128, 8) if block_m == 128 else (64, 4)
    block_k = tile_of(scale_block, in_features, 128)
    limit = chip.shared_memory
    stages = next((s for s in (4, 3, 2) if shared_bytes(block_m, block_n, block_k, s, native) <= limit), 1)
    programs = ceil_div(n, block_n) * ceil_div(m, block_m)
    blocks = ceil_div(in_features, block_k)
    want = max(1, min(chip.multiprocessors * 2 // programs, blocks // 4))
    share = ceil_div(blocks, want)
    return PairPlan(block_m, block_n, block_k, ceil_div(blocks, share), share, warps, stages)


def shared_bytes(block_m: int, block_n: int, block_k: int, stages: int, native: bool) -> int:
    """An upper estimate of the kernel's shared memory: staged codes, and their values where they must be decoded."""
    codes = (block_m + block_n) * block_k
    return stages * codes + (0 if native else 2 * codes)
