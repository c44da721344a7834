"""Several programs share the sum of one output tile, and the last of them to arrive adds up what they all found.

One launch instead of two, and the order of the sum is fixed, so results do not depend on who is last.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

MOST_TILES = 1 << 14
"""Output tiles of one launch that is split: the tickets that are kept."""


@functools.cache
def tickets(device: torch.device) -> torch.Tensor:
    """int32 [MOST_TILES] of zeros on the device, which every launch leaves zero again. One for all launches: they must
    not overlap. The first call must not happen while a CUDA graph is captured."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@triton.jit
def join_parts(p_parts, p_tickets, b_part, i_tile, i_split, splits, UNROLL: tl.constexpr):
    """Leaves b_part, the share of split i_split in tile i_tile. Returns whether all are there now, and then their sum.

    p_parts    float32 [tiles, splits, elements of b_part]
    p_tickets  int32, one for each tile: 0 before and after
    UNROLL     1 or 4: parts that are read at a time
    """
    PART: tl.constexpr = b_part.shape[0] * b_part.shape[1]
    o = tl.arange(0, b_part.shape[0])[:, None] * b_part.shape[1] + tl.arange(0, b_part.shape[1])[None, :]
    p_first = p_parts + i_tile * splits * PART + o
    tl.store(p_first + i_split * PART, b_part)
    tl.debug_barrier()
    done = tl.atomic_add(p_tickets + i_tile, 1, sem="acq_rel", scope="gpu") == splits - 1
    b_sum = b_part
    if done:
        b_sum = tl.zeros(b_part.shape, tl.float32)
        for i in tl.range(0, splits, UNROLL, num_stages=1):
            b_sum += tl.load(p_first, cache_modifier=".cg")
            if UNROLL == 4:
                b_1 = tl.load(p_first + PART, mask=i + 1 < splits, other=0.0, cache_modifier=".cg")
                b_2 = tl.load(p_first + 2 * PART, mask=i + 2 < splits, other=0.0, cache_modifier=".cg")
                b_3 = tl.load(p_first + 3 * PART, mask=i + 3 < splits, other=0.0, cache_modifier=".cg")
                b_sum += b_1 + (b_2 + b_3)
            p_first += UNROLL * PART
        tl.store(p_tickets + i_tile, 0)
    return done, b_sum
