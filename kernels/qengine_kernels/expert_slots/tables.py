"""What the slots of one layer hold, and where the bytes of its experts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WIDE, WIDE_PIECE = 16, 16 << 10
"""Bytes of the widest load, and those that one program copies with such loads: enough of them under way at once to keep
the link busy. Parts whose places and sizes are multiples of WIDE are copied that way."""
NARROW_PIECE = 1 << 10
"""Bytes that one program copies one by one: of parts that are not, single scales for instance."""
CLOCK, QUERIES, HITS = 0, 1, 2
"""Columns of `SlotTables.counts`: steps so far, experts that they asked for, and those of them that had a slot."""


@dataclass(frozen=True)
class SlotTables:
    """slot_of int32 [E]: the slot of each expert, -1 for none; expert_of int32 [S]: the expert in each slot, -1 for
    none; used int64 [S]: the step that used a slot last; counts int64 [3]. All on the device."""

    slot_of: torch.Tensor
    expert_of: torch.Tensor
    used: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, experts: int, slots: int, counts: torch.Tensor) -> SlotTables:
        """No expert in any slot. `counts` int64 [3] of zeros may be a row of a table that other layers share."""
        device = counts.device
        return cls(
            torch.full((experts,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            counts,
        )

    def clear(self) -> None:
        """Nobody has a slot any more."""
        self.slot_of.fill_(-1)
        self.expert_of.fill_(-1)

    @property
    def experts(self) -> int:
        return self.slot_of.shape[0]

    @property
    def slots(self) -> int:
        return self.expert_of.shape[0]


@dataclass(frozen=True)
class CopyPart:
    """One tensor of every expert, in bytes: where expert 0's begins in host memory and slot 0's in the pool, and the
    size of one expert's. Those of the others follow without gaps."""

    source: int
    pool: int
    nbytes: int


@dataclass(frozen=True)
class Copies:
    """How an expert is copied, in pieces.

    source, pool   uint8: the layer's host memory (pinned for a GPU) and the slots' on the device
    wide, narrow   int64 [pieces, 4] on the device: source of expert 0, pool of slot 0, step from one expert to the
                   next, length. Wide ones in units of WIDE bytes, narrow ones in bytes
    """

    source: torch.Tensor
    pool: torch.Tensor
    wide: torch.Tensor
    narrow: torch.Tensor


def copies_of(parts: Sequence[CopyPart], source: torch.Tensor, pool: torch.Tensor) -> Copies:
    """The pieces of these parts. `source` and `pool` begin at multiples of WIDE bytes."""
    if source.data_ptr() % WIDE or pool.data_ptr() % WIDE:
        raise ValueError(f"host memory and pool of expert slots must begin at multiples of {WIDE} bytes")
    pieces: dict[int, list[tuple[int, int, int, int]]] = {WIDE: [], 1: []}
    for part in parts:
        narrow = (part.source | part.pool | part.nbytes) % WIDE
        unit, most = (1, NARROW_PIECE) if narrow else (WIDE, WIDE_PIECE)
        for at in range(0, part.nbytes, most):
            piece = (part.source + at, part.pool + at, part.nbytes, min(most, part.nbytes - at))
            pieces[unit].append(tuple(n // unit for n in piece))  # type: ignore[arg-type]
    made = (torch.tensor(found, dtype=torch.int64).view(-1, 4).to(pool.device) for found in pieces.values())
    return Copies(source, pool, *made)
