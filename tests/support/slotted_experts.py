"""A grouped operation over slots beside the same over all experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qengine.plugin import ExpertPairs, ExpertsOp


def over_slots(op: ExpertsOp, held: Sequence[int]) -> ExpertsOp:
    """The operation over as many slots as experts are held; what it keeps otherwise moves away."""
    slots = op.over({name: t[list(held)].clone() for name, t in op.buffers().items()})
    assert slots is not None
    return slots


def same_in_slots(op: ExpertsOp, x: torch.Tensor, pairs: ExpertPairs, combine: bool, held: Sequence[int]) -> bool:
    """Whether every pair's result has the same bits where the experts that `pairs` ask for are in other places."""
    return torch.equal(by_pair(op, x, pairs, combine), in_slots(over_slots(op, held), x, pairs, combine, held))


def in_slots(
    slots: ExpertsOp, x: torch.Tensor, pairs: ExpertPairs, combine: bool, held: Sequence[int]
) -> torch.Tensor:
    """Results by pair number. `x` as for `pairs`: with `combine` its rows are in the order of the experts."""
    experts = torch.empty_like(pairs.order)
    counts = pairs.offsets.diff().long()
    experts[pairs.order] = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    places = torch.tensor([held.index(int(e)) for e in experts], device=experts.device)
    ids, order = places.sort(stable=True)
    numbers = torch.arange(len(held) + 1, device=ids.device)
    sorted_by_slot = ExpertPairs(order, torch.searchsorted(ids, numbers, out_int32=True), pairs.weights, pairs.top_k)
    if combine:
        rows = torch.empty_like(x)
        rows[pairs.order] = x
        x = rows[order]
    return by_pair(slots, x, sorted_by_slot, combine)


def by_pair(op: ExpertsOp, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
    got = op(x, pairs, combine)
    if combine:
        return got
    out = torch.empty_like(got)
    out[pairs.order] = got
    return out
