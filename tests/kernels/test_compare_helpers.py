"""The compare helpers see what they are for."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from covering import all_pairs
from qengine_kernels.launch import Chip, ceil_div, power_of_2
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id, relative_error


def test_relative_error_is_a_ratio_and_nan_is_infinite() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want * 1.1, want) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan"), 4.0]), want) == float("inf")
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_mismatch_says_what_and_where() -> None:
    with pytest.raises(KernelMismatch, match=r"gemm: relative error .* worst at \(1, 0\): 5 instead of 3"):
        assert_close("gemm", torch.tensor([[1.0, 2.0], [5.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0.1)
    with pytest.raises(KernelMismatch, match=r"shape \(2,\), reference \(3,\)"):
        assert_close("x", torch.zeros(2), torch.zeros(3), 1.0)


def test_unwritten_memory_shows() -> None:
    with poisoned_empty():
        assert torch.isnan(torch.empty(3)).all() and torch.isnan(torch.empty_like(torch.zeros(2))).all()
        assert (torch.empty(2, dtype=torch.uint8) == 255).all()
    assert torch.empty(1).shape == (1,)


def test_ids_and_sizes() -> None:
    assert readable_id((torch.float16, None, 3)) == "float16xnonex3"
    assert (ceil_div(9, 4), power_of_2(80), power_of_2(3, least=16), power_of_2(1)) == (3, 128, 16, 1)


def test_known_chips() -> None:
    assert not Chip.known(75).tensor_cores and Chip.known(80).tensor_cores
    assert Chip.known(90).shared_memory == 227 * 1024
    assert Chip.known(999).shared_memory == 64 * 1024, "an unknown chip gets the smallest limit"


@pytest.mark.parametrize("sizes", [(5, 4, 3, 2), (7, 3, 2), (3, 4), (1, 2)])
def test_every_pair_of_values_meets(sizes: tuple[int, ...]) -> None:
    rows = all_pairs(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(rows) <= 1.2 * max(x * y for x, y in combinations(sizes, 2)), "hardly more than what two axes need"
