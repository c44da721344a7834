"""Launches of the 8-bit weight-only kernels."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip, ceil_div
from qengine_kernels.w8a16_gemm.config import SCRATCH_BYTES, BytePlan, Route, plan_bytes
from qengine_kernels.w8a16_gemm.kernel import byte_dequantize_kernel, byte_gemm_kernel, byte_gemv_kernel
from qengine_kernels.w8a16_gemm.layout import ByteWeight
from qengine_kernels.wna16_gemm.kernel import sum_splits_kernel

SUM_BLOCK = 1024
NATIVE_SM = 89
"""From here on the hardware converts 8-bit floats."""


def launch_w8a16(
    x: torch.Tensor,
    weight: ByteWeight,
    bias: torch.Tensor | None,
    decode: Any,
    chip: Chip | None = None,
    route: Route | None = None,
) -> torch.Tensor:
    """See `qengine_kernels.w8a16_gemm.w8a16_matmul`."""
    m, k = x.shape
    if k != weight.in_features:
        raise ValueError(f"x has {k} columns, the weight {weight.in_features}")
    if m == 0:
        return torch.empty((0, weight.out_features), dtype=x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    chip = Chip.of(x.device) if chip is None else chip
    plan = plan_bytes(chip, m, weight.out_features, k, weight.block_k, x.element_size(), route)
    constants = {
        "DECODE": decode,
        "NATIVE": chip.sm >= NATIVE_SM,
        "BLOCKED": weight.blocked,
        "HAS_ROWS": weight.rows is not None,
    }
    if plan.route == "dequantize":
        return _dequantize_then_multiply(x, weight, bias, plan, constants)
    return _fused(x, weight, bias, plan, constants)


def _fused(
    x: torch.Tensor, weight: ByteWeight, bias: torch.Tensor | None, plan: BytePlan, constants: dict[str, Any]
) -> torch.Tensor:
    m, k = x.shape
    n = weight.out_features
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    split = plan.splits > 1
    target = torch.empty((plan.splits, m, n), dtype=torch.float32, device=x.device) if split else out
    kernel = byte_gemv_kernel if plan.route == "gemv" else byte_gemm_kernel
    kernel[(ceil_div(n, plan.block_n), plan.splits, ceil_div(m, plan.block_m))](
        x,
        weight.codes,
        weight.scales,
        weight.codes if weight.rows is None else weight.rows,
        weight.scales if bias is None else bias,
        target,
        m,
        n,
        k,
        x.stride(0),
        weight.block_k,
        weight.scales.shape[1],
        plan.share,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **constants,
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


def _dequantize_then_multiply(
    x: torch.Tensor, weight: ByteWeight, bias: torch.Tensor | None, plan: BytePlan, constants: dict[str, Any]
) -> torch.Tensor:
    m, k = x.shape
    n = weight.out_features
    chunk = min(n, max(SCRATCH_BYTES // (k * x.element_size()) // plan.block_n, 1) * plan.block_n)
    scratch = torch.empty((chunk, k), dtype=x.dtype, device=x.device)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    for first in range(0, n, chunk):
        count = min(chunk, n - first)
        dense = scratch[:count]
        byte_dequantize_kernel[(ceil_div(count, plan.block_n), ceil_div(k, plan.block_k))](
            weight.codes,
            weight.scales,
            weight.codes if weight.rows is None else weight.rows,
            dense,
            k,
            first,
            count,
            weight.block_k,
            weight.scales.shape[1],
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            num_warps=plan.num_warps,
            **constants,
        )
        columns = out[:, first : first + count]
        if bias is None:
            torch.mm(x, dense.t(), out=columns)
        else:
            torch.addmm(bias[first : first + count].to(x.dtype), x, dense.t(), out=columns)
    return out
