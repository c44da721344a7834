"""Launches of the slot kernels."""

from __future__ import annotations

import torch

from qengine_kernels.expert_slots.kernel import choose_slots_kernel, fetch_experts_kernel, name_slots_kernel
from qengine_kernels.expert_slots.tables import NARROW_PIECE, WIDE, WIDE_PIECE, Copies, SlotTables
from qengine_kernels.launch import ceil_div, power_of_2

BLOCK_P, BLOCK_S, BLOCK_NAMES = 16, 16, 128


def launch_slots(tables: SlotTables, ids: torch.Tensor, copies: Copies) -> torch.Tensor:
    """See `qengine_kernels.expert_slots.slots_for`."""
    pairs, most = len(ids), min(len(ids), tables.experts)
    named = torch.empty_like(ids)
    if pairs == 0:
        return named
    fetch = torch.empty((2, most), dtype=torch.int32, device=ids.device)
    choose_slots_kernel[(ceil_div(tables.slots, BLOCK_S),)](
        ids, tables.slot_of, tables.expert_of, tables.used, tables.counts, fetch, pairs, most, tables.experts,
        tables.slots, EXPERTS=power_of_2(tables.experts), SLOTS=power_of_2(tables.slots), MOST=power_of_2(most),
        BLOCK_P=BLOCK_P, BLOCK_S=BLOCK_S,
    )  # fmt: skip
    entered = False
    ways = ((copies.wide, torch.int32, WIDE // 4, WIDE_PIECE // 4), (copies.narrow, torch.uint8, 1, NARROW_PIECE))
    for pieces, element, unit, block in ways:
        if len(pieces):
            fetch_experts_kernel[(len(pieces), most)](
                copies.source.view(element), copies.pool.view(element), pieces, fetch, tables.slot_of,
                tables.expert_of, most, UNIT=unit, BLOCK=block, ENTER=not entered,
            )  # fmt: skip
            entered = True
    name_slots_kernel[(ceil_div(pairs, BLOCK_NAMES),)](
        ids, tables.slot_of, tables.used, tables.counts, named, pairs, BLOCK=BLOCK_NAMES
    )
    return named
