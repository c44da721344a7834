"""What g_idx may say: the plain map, a shuffled one, nothing, all zeros, or nonsense."""

from __future__ import annotations

import pytest
import torch

from qengine_gptq.order import ALL_ZERO, SHUFFLED, read_order

PLAIN = torch.arange(96) // 32


def test_plain_and_absent_maps_reorder_nothing() -> None:
    for act_order in (True, False):
        assert read_order(PLAIN.int(), 96, 32, 3, act_order) == (None, None)
        assert read_order(None, 96, 32, 3, act_order) == (None, None)
        assert read_order(torch.zeros(96, dtype=torch.int32), 96, 96, 1, act_order) == (None, None)
        ragged = torch.arange(96) // 64
        assert read_order(ragged, 96, 64, 2, act_order) == (None, None)


@pytest.mark.parametrize("size", [32, 64])
def test_a_shuffled_map_sorts_the_inputs(size: int) -> None:
    g_idx = (torch.arange(96) // size)[torch.randperm(96, generator=torch.Generator().manual_seed(1))]
    order, note = read_order(g_idx.int(), 96, size, -(-96 // size), True)
    assert note is None and order is not None and order.dtype is torch.int32
    assert torch.equal(g_idx[order], torch.arange(96) // size)
    assert sorted(order.tolist()) == list(range(96))
    for g in range(2):
        rows = order[g * size : (g + 1) * size]
        assert torch.equal(rows, rows.sort().values), "stable: inputs of a group keep their order"


def test_the_file_counts_and_not_the_flag() -> None:
    order, note = read_order(PLAIN.flip(0).int(), 96, 32, 3, False)
    assert order is not None and note == SHUFFLED


def test_all_zeros() -> None:
    """C04: not "everything in group 0"."""
    zeros = torch.zeros(96, dtype=torch.int32)
    assert read_order(zeros, 96, 32, 3, False) == (None, ALL_ZERO)
    with pytest.raises(ValueError, match="all zeros, but desc_act is true and there are 3 groups"):
        read_order(zeros, 96, 32, 3, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 3}, r"groups 0\.\.3, but there are 3 rows"),
        ({0: -1}, r"groups -1\.\.2, but"),
        ({0: 2}, r"gives group 0 31 inputs; need 32 \(group_size 32\)"),
    ],
)
def test_nonsense_is_refused(change: dict[int, int], message: str) -> None:
    g_idx = PLAIN.clone()
    for at, group in change.items():
        g_idx[at] = group
    with pytest.raises(ValueError, match=message):
        read_order(g_idx.int(), 96, 32, 3, True)
