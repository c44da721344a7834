"""Three kernels, one after another: choose slots, copy experts, name the slots of ids.

The first one reads the tables and writes none of what it reads, so that its programs need not know of each other; the
second one enters each copied expert into them, one program an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "most"])
def choose_slots_kernel(
    p_ids,
    p_slot_of,
    p_expert_of,
    p_used,
    p_counts,
    p_fetch,
    pairs,
    most,
    experts,
    slots,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (block of slots). p_ids int64 [pairs] -> p_fetch int32 [2, most]: experts that are in no slot, in ascending
    order, and below them the slots that they take: those that no id asks for, the longest unused first, empty ones
    before all others. -1 behind the last one. Counts the step."""
    o_expert = tl.arange(0, EXPERTS)
    o_slot = tl.arange(0, SLOTS)
    b_held = tl.load(p_expert_of + o_slot, mask=o_slot < slots, other=-1)
    b_used = tl.load(p_used + o_slot, mask=o_slot < slots, other=0)
    b_asked = tl.zeros([EXPERTS], tl.int32)
    b_busy = tl.zeros([SLOTS], tl.int32)
    for i_pair in tl.range(0, pairs, BLOCK_P):
        o_pair = i_pair + tl.arange(0, BLOCK_P)
        b_id = tl.load(p_ids + o_pair, mask=o_pair < pairs, other=-2).to(tl.int32)
        b_asked += tl.sum((o_expert[:, None] == b_id[None, :]).to(tl.int32), 1)
        b_busy += tl.sum((b_held[:, None] == b_id[None, :]).to(tl.int32), 1)
    b_slot_of = tl.load(p_slot_of + o_expert, mask=o_expert < experts, other=0)
    b_missing = ((b_asked > 0) & (b_slot_of < 0)).to(tl.int32)
    b_rank = tl.cumsum(b_missing, 0) - 1
    missing = tl.sum(b_missing, 0)

    i_block = tl.program_id(0)
    o_own = i_block * BLOCK_S + tl.arange(0, BLOCK_S)
    b_own_used = tl.load(p_used + o_own, mask=o_own < slots, other=0)
    b_free = ((b_busy == 0) & (o_slot < slots)).to(tl.int32)
    b_own_free = tl.sum((o_own[:, None] == o_slot[None, :]).to(tl.int32) * b_free[None, :], 1)
    before = (b_used[None, :] < b_own_used[:, None]) | (
        (b_used[None, :] == b_own_used[:, None]) & (o_slot[None, :] < o_own[:, None])
    )
    b_place = tl.sum(before.to(tl.int32) * b_free[None, :], 1)
    takes = (b_own_free > 0) & (b_place < missing)
    mine = (b_rank[None, :] == b_place[:, None]) & (b_missing[None, :] > 0)
    b_expert = tl.sum(mine.to(tl.int32) * o_expert[None, :], 1)
    tl.store(p_fetch + b_place, b_expert, mask=takes)
    tl.store(p_fetch + most + b_place, o_own, mask=takes)
    if i_block == 0:
        o_fetch = tl.arange(0, MOST)
        tl.store(p_fetch + o_fetch, -1, mask=(o_fetch >= missing) & (o_fetch < most))
        asked = tl.sum((b_asked > 0).to(tl.int32), 0)
        tl.store(p_counts, tl.load(p_counts) + 1)
        tl.store(p_counts + 1, tl.load(p_counts + 1) + asked)
        tl.store(p_counts + 2, tl.load(p_counts + 2) + asked - missing)


@triton.jit(do_not_specialize=["most"])
def fetch_experts_kernel(
    p_source,
    p_pool,
    p_pieces,
    p_fetch,
    p_slot_of,
    p_expert_of,
    most,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTER: tl.constexpr,
):
    """Grid (piece, place in p_fetch). Copies one piece of one expert from host memory to its slot; places and lengths
    of pieces count UNIT elements. ENTER: the first piece's program enters the expert into the tables."""
    i_place = tl.program_id(1)
    expert = tl.load(p_fetch + i_place)
    if expert < 0:
        return
    slot = tl.load(p_fetch + most + i_place)
    p_piece = p_pieces + tl.program_id(0).to(tl.int64) * 4
    step = tl.load(p_piece + 2)
    source = (tl.load(p_piece) + expert.to(tl.int64) * step) * UNIT
    pool = (tl.load(p_piece + 1) + slot.to(tl.int64) * step) * UNIT
    o = tl.arange(0, BLOCK)
    mask = o < tl.load(p_piece + 3) * UNIT
    tl.store(p_pool + pool + o, tl.load(p_source + source + o, mask=mask, other=0), mask=mask)
    if ENTER:  # noqa: SIM102 - known when compiling, unlike what is inside
        if tl.program_id(0) == 0:
            left = tl.load(p_expert_of + slot)
            if left >= 0:
                tl.store(p_slot_of + left, -1)
            tl.store(p_expert_of + slot, expert)
            tl.store(p_slot_of + expert, slot)


@triton.jit(do_not_specialize=["pairs"])
def name_slots_kernel(p_ids, p_slot_of, p_used, p_counts, p_slots, pairs, BLOCK: tl.constexpr):
    """Grid (block of ids). p_ids int64 [pairs] -> p_slots int64 [pairs]; their slots are used in this step."""
    o_pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_pair < pairs
    b_id = tl.load(p_ids + o_pair, mask=mask, other=0)
    b_slot = tl.load(p_slot_of + b_id, mask=mask, other=0)
    tl.store(p_slots + o_pair, b_slot.to(tl.int64), mask=mask)
    b_now = tl.load(p_counts) + tl.zeros([BLOCK], tl.int64)
    tl.store(p_used + b_slot, b_now, mask=mask)
