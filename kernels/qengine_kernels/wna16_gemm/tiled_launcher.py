"""Launches of the kernels over tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from qengine_kernels.launch import Chip
from qengine_kernels.overlap import overlap
from qengine_kernels.split_k import tickets
from qengine_kernels.wna16_gemm.config import Route
from qengine_kernels.wna16_gemm.tiled_config import TilePlan, chunk_of, plan_tiles
from qengine_kernels.wna16_gemm.tiled_kernel import tiled_dequantize_kernel, tiled_kernel
from qengine_kernels.wna16_gemm.tiles import OUTPUTS, TiledWeight

SCALES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SWATH = 8
"""Tiles of N that programs go through for one tile of M before they turn to the next."""


def launch_tiled(
    x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, chip: Chip, route: Route | None = None
) -> torch.Tensor:
    """x [M, K] float16 or bfloat16 with contiguous rows, bias [N] or None -> [M, N] in x's dtype. "gemv" and "gemm"
    both stand for the kernel over tiles, "dequantize" for a library GEMM; None picks by shape and chip."""
    plan = plan_tiles(chip, x.shape[0], weight.out_features, weight.in_features, weight.group, route)
    return run_plan(x, weight, bias, plan)


def run_plan(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, plan: TilePlan) -> torch.Tensor:
    """As `launch_tiled`, with a plan that was made for this shape."""
    if plan.kind == "dequantize":
        return _dequantize_then_multiply(x, weight, bias, plan)
    if plan.kind == "paired":
        from qengine_kernels.wna16_gemm.paired_launcher import launch_paired

        return launch_paired(x, weight, bias, plan)
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    split = plan.splits > 1
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    parts = torch.empty(plan.elements, dtype=torch.float32, device=x.device) if split else out
    tiled_kernel[(plan.tiles, plan.splits)](
        x,
        weight.words,
        weight.meta,
        x if bias is None else bias,
        out,
        parts,
        tickets(x.device) if split else weight.meta,
        m,
        n,
        k,
        x.stride(0),
        plan.share,
        HAS_BIAS=bias is not None,
        ASM=x.is_cuda,
        **tile_constants(plan, weight.group, weight.scale_dtype, Chip.of(x.device).sm),
        **overlap(x.device),
    )
    return out


def tile_constants(plan: TilePlan, group: int, scale_dtype: torch.dtype, sm: int) -> dict[str, Any]:
    """The compile-time arguments of `tiled_kernel` that follow from a plan, a weight's layout and the chip that runs
    it: only sm_90's matrix units work on behind the program's back with operands in registers."""
    return {
        "FINISH": sm == 90,
        "PARTS": plan.parts,
        "COLUMNS": plan.columns,
        "GROUP": group,
        "SCALE": SCALES[scale_dtype],
        "ROWS": plan.rows,
        "BLOCK_M": plan.block_m,
        "SWATH": SWATH,
        "FEW": plan.kind == "few",
        "SPLIT": plan.splits > 1,
        "STAGES": plan.num_stages,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }


def dequantize_tiles(weight: TiledWeight, out: torch.Tensor, first: int, columns: int) -> None:
    """Outputs [first, first + len(out)) of the weight into `out` [outputs, K], contiguous, float16 or bfloat16; both
    counts are multiples of 64. `columns`: of words, that a program takes (see `whole_groups`)."""
    k = weight.in_features
    tiled_dequantize_kernel[(k // (4 * columns), len(out) // OUTPUTS)](
        weight.words,
        weight.meta,
        out,
        weight.out_features,
        k,
        first // OUTPUTS,
        COLUMNS=columns,
        GROUP=weight.group,
        SCALE=SCALES[weight.scale_dtype],
        ROWS=1,
        ASM=out.is_cuda,
        num_warps=4,
    )


def _dequantize_then_multiply(
    x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, plan: TilePlan
) -> torch.Tensor:
    n, k = weight.out_features, weight.in_features
    chunk = chunk_of(n, k, x.element_size(), plan.block_m)
    scratch = torch.empty((chunk, k), dtype=x.dtype, device=x.device)
    out = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
    for first in range(0, n, chunk):
        dense = scratch[: min(chunk, n - first)]
        dequantize_tiles(weight, dense, first, plan.columns)
        columns = out[:, first : first + len(dense)]
        if bias is None:
            torch.mm(x, dense.t(), out=columns)
        else:
            torch.addmm(bias[first : first + len(dense)].to(x.dtype), x, dense.t(), out=columns)
    return out
