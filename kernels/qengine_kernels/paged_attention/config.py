"""Tiles and splits of paged attention: pure functions of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass

from qengine_kernels.launch import Chip, ceil_div, power_of_2

MAX_SPLITS = 64
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Decode programs that share one multiprocessor; splits are chosen to fill the chip a whole number of times."""


@dataclass(frozen=True)
class AttentionTile:
    """Rows (query token x head) and cached tokens of one step, and how Triton is to schedule it. `heads` query heads
    of one KV head share a tile, and each tile has block_m // heads tokens."""

    heads: int
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def shared_bytes(chip: Chip, tile: AttentionTile, stored: tuple[int, int], computed: int) -> int:
    """An upper estimate of shared memory: staged K and V as stored, their decoded tiles, q and the probabilities.
    Without tensor cores the float32 result also passes through it.

    `stored` and `computed` are bytes of one cache element of K and of V, and of one element of the compute dtype.
    """
    elements = tile.block_n * tile.block_d
    staged = max(tile.num_stages - 1, 1) * elements * sum(stored)
    decoded = elements * computed * sum(size != computed for size in stored)
    result = 0 if chip.tensor_cores else 4 * tile.block_m * tile.block_d
    return staged + decoded + result + tile.block_m * (tile.block_d + tile.block_n) * computed


def attention_tile(
    chip: Chip, group: int, head_dim: int, stored: tuple[int, int], computed: int, decode: bool
) -> AttentionTile:
    """The largest tile of a short list that fits the chip's shared memory.

    A decode tile holds the query heads of one KV head (16 rows at least where tensor cores want them); a prefill tile
    holds as many query tokens as fit beside their heads. Raises ValueError when nothing fits.
    """
    block_d = power_of_2(head_dim, least=32)  # half of it, of which products by pairs are made, is 16 for tl.dot
    least = 16 if chip.tensor_cores else 1
    if chip.sm == 0:
        # Small tiles let small tests cross tile borders.
        rows = 16 if decode else 32
        return AttentionTile(min(group, rows), rows, 16, block_d, 4, 1)
    if decode and chip.tensor_cores and power_of_2(group, 16) == 16:
        tile = _short_tile(chip, group, block_d, stored, computed)
        if tile is not None:
            return tile
    top = power_of_2(group, least) if decode else (128 if block_d * computed <= 256 else 64)
    wide = 128 if decode and block_d <= 64 else 64
    for stages in (3, 2, 1):
        for block_m in (m for m in (128, 64, 32, 16, 8, 4, 2, 1) if least <= m <= top):
            for block_n in (wide, wide // 2, wide // 4):
                tile = AttentionTile(
                    min(group, block_m), block_m, block_n, block_d, 8 if block_m >= 128 else 4, stages
                )
                if shared_bytes(chip, tile, stored, computed) <= chip.shared_memory:
                    return tile
    raise ValueError(f"no attention tile for head_dim {head_dim} fits {chip.shared_memory} bytes (sm_{chip.sm})")


def _short_tile(
    chip: Chip, group: int, block_d: int, stored: tuple[int, int], computed: int
) -> AttentionTile | None:
    """A decode tile of two warps, of which at least two share a multiprocessor; None where none fits.

    On an H200 with head_dim 128: 64 x 8192 tokens in e4m3 256 us with 5 stages and 309 with 3 (block tables take one
    stage more than K and V), in bfloat16 486 us with 3 and 548 with 5, which leave less room for neighbours.
    """
    for stages in (5, 4, 3) if sum(stored) <= 2 else (3,):
        tile = AttentionTile(group, 16, 64, block_d, 2, stages)
        if 2 * shared_bytes(chip, tile, stored, computed) <= chip.shared_memory:
            return tile
    return None


def decode_splits(chip: Chip, sequences: int, kv_heads: int, max_tokens: int, block_n: int) -> int:
    """Over how many programs each decode's cached tokens are split, at least two tiles each for the longest sequence
    that the block table could hold: what keeps all multiprocessors at work to the end, a split costing about 1 %."""
    slots = chip.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    most = max(1, min(ceil_div(max_tokens, 2 * block_n), MAX_SPLITS))
    programs = sequences * kv_heads
    return min(range(1, most + 1), key=lambda s: ceil_div(programs * s, slots) / s * (1 + 0.01 * s))
