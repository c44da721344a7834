"""Launches of the 8-bit by 8-bit kernel."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip, ceil_div
from qengine_kernels.w8a8_gemm.config import plan_pair
from qengine_kernels.w8a8_gemm.few_rows import few_rows_matmul, takes_few_rows
from qengine_kernels.w8a8_gemm.kernel import pair_gemm_kernel
from qengine_kernels.w8a16_gemm.layout import ByteWeight
from qengine_kernels.wna16_gemm.kernel import sum_splits_kernel

SUM_BLOCK = 1024


def launch_w8a8(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: ByteWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    dot: Any,
    native: bool,
    chip: Chip | None = None,
) -> torch.Tensor:
    """See `qengine_kernels.w8a8_gemm.w8a8_matmul`."""
    m, k = codes.shape
    n = weight.out_features
    columns = weight.scales.shape[1]
    if k != weight.in_features or scales.shape not in ((m, 1), (m, columns)):
        raise ValueError(
            f"codes {tuple(codes.shape)} with scales {tuple(scales.shape)} do not fit a weight "
            f"[{n}, {weight.in_features}] with {columns} scales a row"
        )
    chip = Chip.of(codes.device) if chip is None else chip
    if takes_few_rows(chip, m, weight) and scales.shape[1] == 1:
        return few_rows_matmul(codes, scales, weight, bias, dtype, dot, native, chip)
    out = torch.empty((m, n), dtype=dtype, device=codes.device)
    if m == 0:
        return out
    plan = plan_pair(chip, m, n, k, weight.block_k, native)
    split = plan.splits > 1
    target = torch.empty((plan.splits, m, n), dtype=torch.float32, device=codes.device) if split else out
    pair_gemm_kernel[(ceil_div(m, plan.block_m), ceil_div(n, plan.block_n), plan.splits)](
        codes,
        scales,
        weight.codes,
        weight.scales,
        weight.codes if weight.rows is None else weight.rows,
        weight.scales if bias is None else bias,
        target,
        m,
        n,
        k,
        weight.block_k,
        columns,
        plan.share,
        DOT=dot,
        NATIVE=native,
        BLOCKED=weight.blocked,
        A_BLOCKED=scales.shape[1] > 1,
        HAS_ROWS=weight.rows is not None,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if split:
        sum_splits_kernel[(ceil_div(m * n, SUM_BLOCK),)](
            target,
            out if bias is None else bias,
            out,
            m * n,
            n,
            plan.splits,
            HAS_BIAS=bias is not None,
            BLOCK=SUM_BLOCK,
            num_warps=4,
        )
    return out
