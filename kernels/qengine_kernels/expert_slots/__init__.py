"""Slots on the device for some of a layer's experts, the others in pinned host memory: who is in which slot, least
recently used first to go, decided and copied by kernels.

Which experts a step asks for is known only on the device. So nothing here waits for the host, and all of it may be
captured in CUDA graphs: one kernel finds the experts that are in no slot and the slots that they take, one reads them
from host memory, one turns the ids of experts into those of slots.
"""

from __future__ import annotations

import torch

from qengine_kernels.expert_slots.tables import HITS, QUERIES, Copies, CopyPart, SlotTables, copies_of

__all__ = ["HITS", "QUERIES", "Copies", "CopyPart", "SlotTables", "copies_of", "slots_for"]


def slots_for(tables: SlotTables, ids: torch.Tensor, copies: Copies) -> torch.Tensor:
    """ids int64 [P], experts 0 .. E - 1, no more of them than there are slots -> int64 [P], their slots, where their
    bytes are once what is started now has run. `tables` and the pool of `copies` are updated.

    Raises ValueError for more ids than slots: they might be different experts.
    """
    if len(ids) > tables.slots:
        raise ValueError(f"{len(ids)} experts are asked for at once; there are {tables.slots} slots")
    from qengine_kernels.expert_slots.launcher import launch_slots

    return launch_slots(tables, ids, copies)
