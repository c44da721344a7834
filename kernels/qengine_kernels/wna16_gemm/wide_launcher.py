"""Launches of the kernel for many rows of x on sm_90."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qengine_kernels.split_k import tickets
from qengine_kernels.wna16_gemm.tiled_config import TilePlan
from qengine_kernels.wna16_gemm.tiles import TiledWeight
from qengine_kernels.wna16_gemm.wide_kernel import wide_kernel

SCALES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LINES = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch_wide(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, plan: TilePlan) -> torch.Tensor:
    """As `tiled_launcher.run_plan`, for a plan of kind "wide"."""
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    split = plan.splits > 1
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    wide_kernel[(plan.tiles, plan.splits)](
        rows_of(x, plan.block_m),
        weight.words,
        weight.meta,
        x if bias is None else bias,
        out,
        torch.empty(plan.elements, dtype=torch.float32, device=x.device) if split else out,
        tickets(x.device) if split else weight.meta,
        m,
        n,
        k,
        plan.share,
        HAS_BIAS=bias is not None,
        **wide_constants(plan, weight.group, weight.scale_dtype),
    )
    return out


def rows_of(x: torch.Tensor, block_m: int) -> TensorDescriptor:
    """What the copy engine takes: rows that begin at multiples of 16 bytes."""
    if x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor.from_tensor(x, [block_m, 64], LINES)


def wide_constants(plan: TilePlan, group: int, scale_dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of `wide_kernel` that follow from a plan and a weight's layout."""
    return {
        "GROUP": group,
        "SCALE": SCALES[scale_dtype],
        "BLOCK_M": plan.block_m,
        "STAGES": plan.num_stages,
        "SPLIT": plan.splits > 1,
        "num_warps": plan.num_warps,
    }
