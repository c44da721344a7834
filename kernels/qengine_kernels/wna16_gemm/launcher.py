"""Launches of the weight-only kernels."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip, ceil_div
from qengine_kernels.wna16_gemm.config import SCRATCH_BYTES, GemmPlan, Route, grouping, plan_gemm
from qengine_kernels.wna16_gemm.kernel import dequantize_kernel, gemm_kernel, gemv_kernel, sum_splits_kernel
from qengine_kernels.wna16_gemm.layout import PackedWeight
from qengine_kernels.wna16_gemm.tiled_launcher import launch_tiled
from qengine_kernels.wna16_gemm.tiles import TiledWeight

SUM_BLOCK = 1024


def launch_wna16(
    x: torch.Tensor,
    weight: PackedWeight | TiledWeight,
    bias: torch.Tensor | None,
    unpack: Any,
    chip: Chip | None = None,
    route: Route | None = None,
) -> torch.Tensor:
    """See `qengine_kernels.wna16_gemm.wna16_matmul`."""
    m, k = x.shape
    if k != weight.in_features:
        raise ValueError(f"x has {k} columns, the weight {weight.in_features} rows")
    if m == 0:
        return torch.empty((0, weight.out_features), dtype=x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    chip = Chip.of(x.device) if chip is None else chip
    if isinstance(weight, TiledWeight):
        return launch_tiled(x, weight, bias, chip, route)
    plan = plan_gemm(chip, m, weight.out_features, k, x.element_size(), route, weight.slots)
    if plan.route == "dequantize":
        return _dequantize_then_multiply(x, weight, bias, unpack, plan)
    return _fused(x, weight, bias, unpack, plan)


def _constants(weight: PackedWeight, unpack: Any, block_w: int) -> dict[str, Any]:
    return {
        "UNPACK": unpack,
        "SLICE": weight.slice_rows,
        "SLOTS": weight.slots,
        "GROUPING": grouping(weight.group_size, weight.in_features, weight.slice_rows, block_w, weight.slots),
        "HAS_ZEROS": weight.zeros is not None,
        "ZERO": weight.symmetric_zero,
    }


def _fused(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, unpack: Any, plan: GemmPlan
) -> torch.Tensor:
    m, k = x.shape
    n = weight.out_features
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    split = plan.splits > 1
    target = torch.empty((plan.splits, m, n), dtype=torch.float32, device=x.device) if split else out
    kernel = gemv_kernel if plan.route == "gemv" else gemm_kernel
    kernel[(ceil_div(n, plan.block_n), plan.splits, ceil_div(m, plan.block_m))](
        x,
        weight.words,
        weight.scales,
        weight.words if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        target,
        m,
        n,
        k,
        x.stride(0),
        weight.group_size,
        weight.scales.shape[0],
        weight.words.shape[0],
        plan.share,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_W=plan.block_w,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **_constants(weight, unpack, plan.block_w),
    )
    if split:
        bias_or_any = out if bias is None else bias
        grid = (ceil_div(m * n, SUM_BLOCK),)
        sum_splits_kernel[grid](
            target, bias_or_any, out, m * n, n, plan.splits, HAS_BIAS=bias is not None, BLOCK=SUM_BLOCK, num_warps=4
        )
    return out


def _dequantize_then_multiply(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, unpack: Any, plan: GemmPlan
) -> torch.Tensor:
    m, k = x.shape
    n = weight.out_features
    chunk = min(n, max(SCRATCH_BYTES // (k * x.element_size()) // plan.block_n, 1) * plan.block_n)
    scratch = torch.empty(k * chunk, dtype=x.dtype, device=x.device)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    for first in range(0, n, chunk):
        count = min(chunk, n - first)
        dense = scratch[: k * count].view(k, count)
        dequantize(weight, unpack, dense, first, plan)
        columns = out[:, first : first + count]
        if bias is None:
            torch.mm(x, dense, out=columns)
        else:
            torch.addmm(bias[first : first + count].to(x.dtype), x, dense, out=columns)
    return out


def dequantize(weight: PackedWeight, unpack: Any, out: torch.Tensor, first: int, plan: GemmPlan) -> None:
    """Columns [first, first + out.shape[1]) of the weight into `out` [K, count], contiguous, any float dtype."""
    count = out.shape[1]
    word_rows = weight.words.shape[0]
    dequantize_kernel[(ceil_div(count, plan.block_n), ceil_div(word_rows, plan.block_w))](
        weight.words,
        weight.scales,
        weight.words if weight.zeros is None else weight.zeros,
        out,
        weight.out_features,
        weight.in_features,
        first,
        count,
        weight.group_size,
        weight.scales.shape[0],
        word_rows,
        BLOCK_N=plan.block_n,
        BLOCK_W=plan.block_w,
        num_warps=plan.num_warps,
        **_constants(weight, unpack, plan.block_w),
    )
