"""The lowest logit that top_k and top_p keep, for sampling."""

from __future__ import annotations

import torch

from qengine_kernels.top_floor.reference import FEW, top_floor_reference

FEWEST_ROWS = 4
"""Below, sorting is less work: a search takes the same time for up to 64 rows, a sort for each row (1 row of 128,256 on
an H200: 134 us beside 255; 4 rows: 364 beside 274)."""


def top_floor(
    x: torch.Tensor,
    p: torch.Tensor,
    rows: torch.Tensor,
    most: int,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor,
) -> torch.Tensor:
    """The lowest value of x that stays, float32 [M], for M rows of x. Values that tie with the last kept one stay too.

    x float32 [N, V], the maximum of each row 0; p = exp(x). rows int64 [M]: which rows of x are meant. For each of them
    top_k int64 [M] in 1..V, V for none; top_p float32 [M] in (0, 1], applied to what top_k and `floor` leave; floor
    float32 [M] <= 0: what is below is out anyway (-inf: nothing). most: the largest top_k, known on the host.

    CUDA tensors run one Triton kernel, which sorts nothing, unless there are so few rows, or `most` is so small, that
    sorting or picking out the largest values is less work. It sums in float32 where plain torch sums in float64: a
    value whose share of top_p ends within rounding may be kept by one and not by the other.
    """
    if not x.is_cuda or most <= FEW or len(rows) < FEWEST_ROWS:
        return top_floor_reference(x, p, rows, most, top_k, top_p, floor)
    from qengine_kernels.top_floor.kernel import launch_top_floor

    return launch_top_floor(x, rows, top_k, top_p, floor)
