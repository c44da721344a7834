"""Products of cases of which a GPU takes all, and the interpreter as many as meet each other at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

from qengine_kernels.testing import readable_id


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Rows of the product of `axes`, for `parametrize`. Every row runs on a GPU, where a case takes a millisecond.

    Elsewhere, where Triton's interpreter takes up to a second, those rows run that hold every pair of values of
    different axes at least once: what depends on two things shows, what would depend on three is left to the GPU.
    bfloat16 is for GPUs alone: numpy, with which the interpreter computes, has none.
    """
    cpu = [[v for v in axis if v is not torch.bfloat16] for axis in axes]
    chosen = set(all_pairs([len(axis) for axis in cpu]))
    rows = {tuple(axis[i] for axis, i in zip(cpu, row, strict=True)) for row in chosen}
    return [
        pytest.param(*row, marks=() if row in rows else pytest.mark.gpu, id=_id(row)) for row in product(*axes)
    ]


def all_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Few rows of indices below `sizes` in which every two indices of different columns stand together somewhere:
    greedily the row with the most pairs that are still missing, the first of equals."""

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in combinations(range(len(sizes)), 2)}

    rows = [*product(*map(range, sizes))]
    missing, found = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        found.append(best)
    return found


def _id(row: Sequence[Any]) -> str:
    return "-".join(map(readable_id, row))
