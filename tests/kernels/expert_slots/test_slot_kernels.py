"""Expert slots against their meaning in plain Python: tables, counts and bytes, step after step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from qengine_kernels.expert_slots import Copies, CopyPart, SlotTables, copies_of, slots_for
from qengine_kernels.expert_slots.reference import SlotsReference

SIZES = (16 << 10, (16 << 10) + 48, 6, 1030)
"""Bytes of an expert's tensors: one piece, two, and the same of such whose places are no multiples of wide loads."""


class FirstInFirstOut(SlotsReference):
    """The control: the oldest expert leaves, however often it is used."""

    def slots_for(self, ids: Sequence[int]) -> list[int]:
        held, used = list(self.expert_of), list(self.used)
        slots = super().slots_for(ids)
        for slot in slots:
            if self.expert_of[slot] == held[slot]:
                self.used[slot] = used[slot]
        return slots


def layout(experts: int, slots: int) -> tuple[list[CopyPart], int, int]:
    """Parts one behind the other, and the bytes of both sides."""
    parts, source, pool = [], 0, 0
    for size in SIZES:
        parts.append(CopyPart(source, pool, size))
        source += -(-experts * size // 256) * 256
        pool += -(-slots * size // 256) * 256
    return parts, source, pool


def made(
    experts: int, slots: int, device: torch.device, kind: type[SlotsReference] = SlotsReference
) -> tuple[SlotTables, Copies, SlotsReference]:
    parts, size, room = layout(experts, slots)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    meaning = kind(experts, slots, parts, source, torch.zeros(room, dtype=torch.uint8))
    host = source.pin_memory() if device.type == "cuda" else source
    copies = copies_of(parts, host, torch.zeros(room, dtype=torch.uint8, device=device))
    tables = SlotTables.empty(experts, slots, torch.zeros(4, dtype=torch.int64, device=device))
    return tables, copies, meaning


def agree(got: torch.Tensor, want: list[int], tables: SlotTables, copies: Copies, meaning: SlotsReference) -> bool:
    return (
        got.tolist() == want
        and tables.slot_of.tolist() == meaning.slot_of
        and tables.expert_of.tolist() == meaning.expert_of
        and tables.used.tolist() == meaning.used
        and tables.counts.tolist()[:3] == [meaning.clock, meaning.queries, meaning.hits]
        and torch.equal(copies.pool.cpu(), meaning.pool)
    )


def steps(experts: int, slots: int, count: int) -> list[list[int]]:
    """Ids with repetitions, some experts more often than others; steps that fill all slots among them."""
    drawn = random.Random(experts)
    weights = [1 / (e + 1) for e in range(experts)]
    lists = [drawn.choices(range(experts), weights, k=drawn.randint(1, slots)) for _ in range(count)]
    lists[2] = drawn.sample(range(experts), k=slots)
    return lists


@pytest.mark.parametrize(("experts", "slots"), [(9, 3), (40, 17), (5, 5)])
def test_slots_are_those_of_the_definition(experts: int, slots: int, device: torch.device) -> None:
    tables, copies, meaning = made(experts, slots, device)
    control = made(experts, slots, device, FirstInFirstOut)[2]
    differs = False
    for ids in steps(experts, slots, 12):
        got = slots_for(tables, torch.tensor(ids, device=device), copies)
        assert agree(got, meaning.slots_for(ids), tables, copies, meaning)
        differs |= control.slots_for(ids) != got.tolist()
    assert meaning.hits and (differs or slots == experts), "a cache that forgets its oldest expert is told apart"


def test_more_ids_than_slots_and_none_at_all(device: torch.device) -> None:
    tables, copies, _ = made(6, 2, device)
    with pytest.raises(ValueError, match="3 experts are asked for at once; there are 2 slots"):
        slots_for(tables, torch.tensor([1, 1, 1], device=device), copies)
    assert slots_for(tables, torch.tensor([], dtype=torch.int64, device=device), copies).tolist() == []
    assert tables.counts.tolist() == [0, 0, 0, 0]


def test_places_must_be_aligned() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        copies_of([CopyPart(0, 0, 16)], memory[1:], memory)


@pytest.mark.gpu
def test_replayed_from_a_graph() -> None:
    """Decisions are the device's: one capture serves every step."""
    device = torch.device("cuda")
    tables, copies, meaning = made(64, 24, device)
    static = torch.zeros(16, dtype=torch.int64, device=device)
    slots_for(tables, static, copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        named = slots_for(tables, static, copies)
    meaning.slots_for([0] * 16)
    for seed in range(40):
        ids = random.Random(seed).choices(range(64), k=16)
        static.copy_(torch.tensor(ids))
        graph.replay()
        assert agree(named, meaning.slots_for(ids), tables, copies, meaning), f"replay {seed}"
