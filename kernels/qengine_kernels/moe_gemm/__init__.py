"""One linear of every expert of a mixture as one grouped GEMM over tokens sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm.config import describe, most_pairs
from qengine_kernels.moe_gemm.stack import ByteExperts, DenseExperts, ExpertWeights, PackedExperts, Stack

__all__ = [
    "ByteExperts",
    "DenseExperts",
    "ExpertWeights",
    "PackedExperts",
    "Stack",
    "describe",
    "grouped_matmul",
    "most_pairs",
]


def grouped_matmul(
    x: torch.Tensor,
    weights: ExpertWeights,
    order: torch.Tensor,
    offsets: torch.Tensor,
    top_k: int,
    unpack: Any,
    pair_weights: torch.Tensor | None = None,
    chip: Chip | None = None,
) -> torch.Tensor:
    """The linear of each (token, expert) pair, [P, N] in x's dtype, float32 accumulation.

    x float16, bfloat16 (sm_80 up) or float32. Pair number p is choice p % top_k of token p // top_k; no token takes an
    expert twice. order int64 [P] lists pair numbers sorted by expert, offsets int32 [E + 1] where each expert's begin.

    Without `pair_weights`, x is [P / top_k, K] (tokens) and row i of the result belongs to pair order[i]. With them
    (float32 [P], by pair number), x is [P, K] in sorted order and row p of the result is pair p's, times its weight.

    `unpack` is the device function that the format gives the dense GEMM template: `unpack(words, SLOT)` of `wna16_gemm`
    for words of several codes, `decode(codes, NATIVE)` of `w8a16_gemm` for elements of one value.
    """
    from qengine_kernels.moe_gemm.launcher import launch_grouped

    return launch_grouped(x, weights, order, offsets, top_k, unpack, pair_weights, chip)
