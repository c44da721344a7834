"""Launches of the kernel for many rows of x on sm_90."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qengine_kernels.overlap import overlap
from qengine_kernels.split_k import tickets
from qengine_kernels.wna16_gemm.tiled_config import TilePlan
from qengine_kernels.wna16_gemm.tiled_launcher import SCALES, SWATH
from qengine_kernels.wna16_gemm.tiles import INPUTS, OUTPUTS, TiledWeight
from qengine_kernels.wna16_gemm.wide_kernel import wide_kernel

X_LINES = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WORD_LINES = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
META_LINES = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def launch_wide(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, plan: TilePlan) -> torch.Tensor:
    """As `tiled_launcher.run_plan`, for a plan of kind "wide"."""
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    shared = plan.splits > 1
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    parts = plan.elements if shared and plan.share % (k // INPUTS) else 0
    wide_kernel[(plan.tiles,)](
        rows_of(x, plan.block_m),
        *weight_of(weight.words, weight.meta, k, n),
        x if bias is None else bias,
        out,
        torch.empty(parts, dtype=torch.float32, device=x.device) if shared else out,
        tickets(x.device) if shared else weight.meta,
        m,
        n,
        k,
        plan.share,
        HAS_BIAS=bias is not None,
        **wide_constants(plan, weight.group, weight.scale_dtype),
        **overlap(x.device),
    )
    return out


def rows_of(x: torch.Tensor, block_m: int) -> TensorDescriptor:
    """What the copy engine takes: rows that begin at multiples of 16 bytes."""
    if x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor.from_tensor(x, [block_m, INPUTS], X_LINES)


def weight_of(words: torch.Tensor, meta: torch.Tensor, k: int, n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Blocks of a step of 256 outputs: four tiles of words, in lines of 128 bytes, and the scales of their group."""
    lines = words.view(n // OUTPUTS, k // 4, 64)
    return (
        TensorDescriptor.from_tensor(lines, [4, INPUTS // 4, 64], WORD_LINES),
        TensorDescriptor.from_tensor(meta, [1, 256], META_LINES),
    )


def wide_constants(plan: TilePlan, group: int, scale_dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of `wide_kernel` that follow from a plan and a weight's layout."""
    return {
        "GROUP": group,
        "SCALE": SCALES[scale_dtype],
        "BLOCK_M": plan.block_m,
        "STAGES": plan.num_stages,
        "SWATH": SWATH,
        "SHARED": plan.splits > 1,
        "num_warps": plan.num_warps,
        "launch_cooperative_grid": plan.splits > 1,
    }
