"""Launches of the grouped GEMM."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip, ceil_div, power_of_2
from qengine_kernels.moe_gemm.config import GroupedPlan, plan_grouped, row_tiles
from qengine_kernels.moe_gemm.kernel import grouped_gemm_kernel
from qengine_kernels.moe_gemm.stack import ExpertWeights

NATIVE_SM = 89
"""From here on the hardware converts 8-bit floats."""


def launch_grouped(
    x: torch.Tensor,
    weights: ExpertWeights,
    order: torch.Tensor,
    offsets: torch.Tensor,
    top_k: int,
    unpack: Any,
    pair_weights: torch.Tensor | None = None,
    chip: Chip | None = None,
    plan: GroupedPlan | None = None,
) -> torch.Tensor:
    """See `qengine_kernels.moe_gemm.grouped_matmul`; `plan` overrides the choice of tiles, for tests."""
    pairs, w = order.shape[0], weights
    rows = pairs // top_k if pair_weights is None else pairs
    if x.shape != (rows, w.in_features):
        raise ValueError(f"x has shape {tuple(x.shape)}; need {(rows, w.in_features)} for {pairs} pairs")
    if offsets.shape[0] != w.num_experts + 1:
        raise ValueError(f"offsets of {offsets.shape[0] - 1} experts for the weights of {w.num_experts}")
    out = torch.empty((pairs, w.out_features), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    chip = Chip.of(x.device) if chip is None else chip
    if plan is None:
        sizes = (w.slots, x.element_size(), w.values.element_size(), w.group_size if w.groups > 1 else None)
        plan = plan_grouped(chip, pairs, top_k, w.routed or w.num_experts, w.out_features, *sizes)
    grid = (ceil_div(w.out_features, plan.block_n), row_tiles(pairs, w.num_experts, plan.block_m))
    any_tensor = offsets  # stands for an argument that the kernel does not read
    grouped_gemm_kernel[grid](
        x,
        w.values,
        any_tensor if w.scales is None else w.scales,
        any_tensor if w.zeros is None else w.zeros,
        any_tensor if w.scale_rows is None else w.scale_rows,
        any_tensor if w.columns is None else w.columns,
        offsets,
        order,
        any_tensor if pair_weights is None else pair_weights,
        out,
        w.num_experts,
        top_k,
        w.out_features,
        w.in_features,
        ceil_div(w.in_features, w.slots),
        x.stride(0),
        w.values.stride(0),
        *w.value_strides,
        0 if w.scales is None else w.scales.stride(0),
        *w.scale_strides,
        w.group_size,
        w.groups,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_W=plan.block_w,
        DOT=plan.dot,
        COMBINE=pair_weights is not None,
        EXPERTS=power_of_2(w.num_experts),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **_constants(w, unpack, plan.block_w, chip),
    )
    return out


def _constants(weights: ExpertWeights, unpack: Any, block_w: int, chip: Chip) -> dict[str, Any]:
    return {
        "UNPACK": unpack,
        "NATIVE": chip.sm >= NATIVE_SM,
        "SLOTS": weights.slots,
        "SLICE": weights.slice_rows,
        "GROUPING": weights.grouping(block_w),
        "HAS_SCALES": weights.scales is not None,
        "HAS_ZEROS": weights.zeros is not None,
        "ZERO": weights.zero,
        "HAS_SCALE_ROWS": weights.scale_rows is not None,
        "HAS_COLUMNS": weights.columns is not None,
    }
