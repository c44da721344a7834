"""The meaning of expert slots, in plain Python and torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qengine_kernels.expert_slots.tables import CopyPart


class SlotsReference:
    """What `slots_for` does to one layer; `parts` as those of `copies_of`, over uint8 tensors on a CPU."""

    def __init__(
        self, experts: int, slots: int, parts: Sequence[CopyPart], source: torch.Tensor, pool: torch.Tensor
    ) -> None:
        self.parts, self.source, self.pool = parts, source, pool
        self.slot_of: list[int] = [-1] * experts
        self.expert_of: list[int] = [-1] * slots
        self.used = [0] * slots
        self.clock = self.queries = self.hits = 0

    def slots_for(self, ids: Sequence[int]) -> list[int]:
        """The slots of these experts, fetched where they have none."""
        self.clock += 1
        asked = sorted(set(ids))
        missing = [e for e in asked if self.slot_of[e] < 0]
        self.queries += len(asked)
        self.hits += len(asked) - len(missing)
        free = [s for s, held in enumerate(self.expert_of) if held not in asked]
        free.sort(key=lambda s: (self.used[s], s))
        for expert, slot in zip(missing, free, strict=False):
            self._fetch(expert, slot)
        for expert in asked:
            self.used[self.slot_of[expert]] = self.clock
        return [self.slot_of[e] for e in ids]

    def _fetch(self, expert: int, slot: int) -> None:
        left = self.expert_of[slot]
        if left >= 0:
            self.slot_of[left] = -1
        self.expert_of[slot], self.slot_of[expert] = expert, slot
        for part in self.parts:
            a, b = part.source + expert * part.nbytes, part.pool + slot * part.nbytes
            self.pool[b : b + part.nbytes] = self.source[a : a + part.nbytes]
