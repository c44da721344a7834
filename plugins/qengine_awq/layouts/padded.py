"""The padding of scales that gemv and gemv_fast share: their kernels read whole words of eight groups."""

from __future__ import annotations

import torch

from qengine_kernels.launch import ceil_div

GUESSES = (128, 64, 32, -1)
"""What AutoAWQ writes, and one group. Where nothing states a size and 128 is wrong, `check` says so."""


def words(k: int, group_size: int) -> int:
    """Words of eight groups for each output: ceil(G / 8), rounded up to 2 (4) of them for groups of 64 (32)."""
    size = k if group_size == -1 else group_size
    if size < 128 and size not in (32, 64):
        raise ValueError(f"group_size {group_size} does not exist in this layout; need: 32, 64, 128 or larger")
    multiple = {32: 4, 64: 2}.get(size, 1)
    return ceil_div(ceil_div(ceil_div(k, size), 8), multiple) * multiple


def check(leaf: str, values: torch.Tensor, groups: int) -> None:
    """`values` [slots, N]: the first `groups` rows are used, the others padding.

    Raises ValueError when it is the other way round, which means that the groups have another size.
    """
    if values[groups:].any():
        raise ValueError(f"{leaf} has values beyond its {groups} groups, so the group size is smaller than stated")
    if not values[groups - 1].any():
        raise ValueError(f"{leaf} has fewer than {groups} groups, so the group size is larger than stated")
