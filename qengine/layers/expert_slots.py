"""A sparse layer's experts in slots: some on the device, all of them in host memory, from where those that a step asks
for are fetched when they have no slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.plugin import ExpertsOp
from qengine_kernels.expert_slots import Copies, SlotTables, slots_for


@dataclass
class SlotUse:
    """Whether the forward pass under way takes experts from slots; `most_tokens` of a pass that may. One for all layers
    of a model: what copies whole layers must know of the same answer."""

    most_tokens: int
    on: bool = False


@dataclass
class ExpertSlots:
    """`up` and `down` run over slots (`ExpertsOp.over`), whose contents `tables` know and `copies` bring."""

    up: ExpertsOp
    down: ExpertsOp
    tables: SlotTables
    copies: Copies
    use: SlotUse

    @property
    def count(self) -> int:
        return self.tables.slots

    def named(self, experts: torch.Tensor) -> torch.Tensor:
        """experts int64 [P] -> their slots, int64 [P], fetched where they have none. Waits for nothing."""
        return slots_for(self.tables, experts, self.copies)
