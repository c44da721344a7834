"""Launches of the kernel for many rows of x on sm_90, `paired.cu`."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from qengine_kernels.launch import Chip, ceil_div
from qengine_kernels.nvrtc import CopyMap, Kernel, Source, cached_cubin, copy_map, load
from qengine_kernels.overlap import overlap
from qengine_kernels.wna16_gemm.tiled_config import PAIRED_STEPS, TilePlan, paired_bytes, paired_depth, plan_paired
from qengine_kernels.wna16_gemm.tiles import INPUTS, OUTPUTS, TiledWeight

REGISTERS = {1: 232, 2: 232, 3: 160, 4: 112}
"""Of a thread that multiplies, by groups of 128 of them: what 65,536 allow beside 128 threads of the loader with 32."""
SWATH = 4
"""Pairs of tiles of N that programs go through for one tile of M before they turn to the next."""


def launch_paired(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, plan: TilePlan) -> torch.Tensor:
    """As `tiled_launcher.run_plan`, for a plan of kind "paired"."""
    if x.data_ptr() % 16 or x.stride(0) % 8:  # the copy engine takes rows that begin at multiples of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    bias = None if bias is None else bias.to(x.dtype)
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    index = torch.cuda.current_device() if x.device.index is None else x.device.index
    kinds = weight.group, x.dtype, weight.scale_dtype, bias is not None
    if (plan.rows, plan.block_m) in PAIRED_STEPS:
        make_ready(index, *kinds)
    kernel = _kernel(index, plan.rows, plan.block_m, plan.num_stages, *kinds)
    # Rows beyond the last would be filled up with zeros, which takes longer than to read as many.
    last_half = ceil_div(m - (m - 1) // plan.block_m * plan.block_m, 16) * 8
    args = [
        _rows_map(x, plan.block_m // 2),
        _rows_map(x, last_half),
        _words_map(weight.words.data_ptr(), n, k, plan.rows),
        ctypes.c_void_p(weight.meta.data_ptr()),
        ctypes.c_void_p(0 if bias is None else bias.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        *(ctypes.c_int(value) for value in (m, n, k, last_half, plan.share, plan.tiles)),
    ]
    programs = 2 * min(plan.tiles, Chip.of(x.device).multiprocessors // 2)
    kernel.launch(programs, args, overlap(x.device)["PDL"])
    return out


@cache
def make_ready(device: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype, bias: bool) -> None:
    """Compiles and loads the kernels of all tiles, once: which of them is taken depends on the rows of x, and no number
    of rows should be the first of its kind while requests are served."""
    chip = Chip.of(torch.device("cuda", device))
    plans = [plan_paired(chip, *tile, False, 1, OUTPUTS, INPUTS) for tile in PAIRED_STEPS]
    kinds = group, dtype, scale_dtype, bias
    with ThreadPoolExecutor(len(plans)) as pool:  # the compiler lets other threads go on
        list(pool.map(cached_cubin, [source(p.rows, p.block_m, p.num_stages, *kinds) for p in plans]))
    for plan in plans:
        _kernel(device, plan.rows, plan.block_m, plan.num_stages, *kinds)


@cache
def _kernel(
    device: int,
    groups: int,
    rows: int,
    stages: int,
    group: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    bias: bool,
) -> Kernel:
    made = source(groups, rows, stages, group, dtype, scale_dtype, bias)
    return load(made, device, 128 * groups + 128, paired_bytes(groups, rows, stages))


def _rows_map(x: torch.Tensor, rows: int) -> CopyMap:
    """Boxes of so many rows, a multiple of 8, and 64 inputs of x."""
    return copy_map(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(0), (rows, INPUTS), True)


def _words_map(address: int, n: int, k: int, groups: int) -> CopyMap:
    """Tiles of words as they lie in memory: 2 KiB each, all of K one after the other."""
    size = (n // OUTPUTS, k // INPUTS * 256)
    return copy_map(address, torch.int64, size, size[1], (groups, 256), False)


def source(
    groups: int, rows: int, stages: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype, bias: bool
) -> Source:
    """The kernel for tiles of 64 * groups outputs and so many rows. Constants:

    GROUPS, ROWS, STAGES  `rows`, `block_m` and `num_stages` of a plan
    DEPTH                 times 64 inputs of a stage
    GROUP                 as in `TiledWeight`
    AHEAD                 whether weights are decoded while products of the same group run, for which four groups with
                          many rows have no registers
    """
    constants = {
        "GROUPS": groups,
        "ROWS": rows,
        "STAGES": stages,
        "DEPTH": paired_depth(rows),
        "GROUP": group,
        "SWATH": SWATH,
        "BF16": int(dtype == torch.bfloat16),
        "SCALE_BF16": int(scale_dtype == torch.bfloat16),
        "BIAS": int(bias),
        "REGISTERS": REGISTERS[groups],
        "AHEAD": int(groups < 4 or rows < 112),
    }
    text = _multiply(rows, dtype) + Path(__file__).with_name("paired.cu").read_text()
    return Source("paired", text, tuple(constants.items()), "sm_90a")


def _multiply(rows: int, dtype: torch.dtype) -> str:
    """One product of 64 outputs, 16 inputs and so many rows: its name, its registers and so its text depend on them."""
    count, kind = rows // 2, "bf16" if dtype == torch.bfloat16 else "f16"
    sums = ", ".join(f"%{i}" for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    bound = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{count}], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned x) {{
  asm volatile("{{\\n.reg .pred add;\\n.reg .b64 rows;\\nsetp.eq.u32 add, 0, 0;\\n"
               "mov.b64 rows, {{%{count + 4}, 0x40000040}};\\n"
               "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} "
               "{{{sums}}}, {{{left}}}, rows, add, 1, 1, 0;\\n}}"
               : {bound} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x));
}}
"""
