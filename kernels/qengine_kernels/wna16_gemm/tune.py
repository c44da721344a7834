"""Measures tiles of 4-bit linears on this GPU, for a table that later starts take (`tile_table`). Nothing is measured
while serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch

from qengine_kernels.launch import Chip, power_of_2
from qengine_kernels.nvrtc import cached_cubin
from qengine_kernels.overlap import overlap
from qengine_kernels.timing import copies, error, graph_us
from qengine_kernels.wna16_gemm.layout import PackedWeight, pack_codes
from qengine_kernels.wna16_gemm.reference import dequantize_reference
from qengine_kernels.wna16_gemm.tile_table import Shape
from qengine_kernels.wna16_gemm.tiled_config import (
    PAIRED_STEPS,
    Entry,
    TilePlan,
    paired_runs,
    plan_entry,
    shared_bytes,
    table_for,
)
from qengine_kernels.wna16_gemm.tiled_kernel import tiled_kernel
from qengine_kernels.wna16_gemm.tiled_launcher import run_plan, tile_constants
from qengine_kernels.wna16_gemm.tiles import OUTPUTS, TiledWeight, to_tiles

ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of rows of x up to which an entry serves."""
LIMIT = 0.01
"""Relative error of a result in bfloat16 above which tiles are not taken."""


@dataclass(frozen=True)
class Trial:
    """What is measured for up to `most` rows: launches with the entries they come from, and the launch in use."""

    most: int
    entries: dict[TilePlan, Entry]
    used: TilePlan


@dataclass(frozen=True)
class Found:
    """The fastest entry for up to `entry.most` rows, its time, and that of what is in use now (NaN: not taken)."""

    entry: Entry
    us: float
    used_us: float


def candidates(most: int) -> Iterator[Entry]:
    """Entries worth a measurement for up to `most` rows."""
    if most <= 16:
        for columns, rows, stages, fill in product((32, 64), (1, 2), (3, 4), (2, 3, 4)):
            yield Entry(most, "few", columns, rows, power_of_2(most, 8), 4, stages, fill)
    if most > 32:
        for (rows, block_m), fill in product((*PAIRED_STEPS, (2, 64), (4, 64), (4, 128)), range(2)):
            yield Entry(most, "paired", 16, rows, block_m, 4, 0, fill)
    if most > 512:
        yield from (dequantize(most, chunk) for chunk in (0, 2048, 4096, 6144))
        return
    block_ms = {max(power_of_2(most) >> halvings, 16) for halvings in range(3)}
    for block_m, rows, warps in product(sorted(b for b in block_ms if b <= 256), (1, 2), (4, 8)):
        sums = OUTPUTS * rows * block_m // (32 * warps)  # float32 a thread
        if 8 <= sums <= 128 and (warps == 4 or rows == 2):
            for (columns, stages), fill in product(((16, 4), (32, 3), (32, 4)), (1, 3)):
                yield Entry(most, "many", columns, rows, block_m, warps, stages, fill)


def tune(
    shapes: Sequence[Shape], rows: Sequence[int], say: Callable[[str], None], processes: int
) -> dict[Shape, list[Found]]:
    """Shapes of 4-bit weights -> the best entry for each number of rows. Compiles in `processes` processes."""
    chip = Chip.of(torch.device("cuda"))
    trials = {shape: [trial(chip, shape, m) for m in sorted(rows)] for shape in shapes}
    jobs = {(variant(plan), shape[2]) for shape, of in trials.items() for t in of for plan in t.entries}
    say(f"{len(jobs)} kernels to compile in {processes} processes")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_variant, jobs))
    return {shape: measure(shape, of, say) for shape, of in trials.items()}


def trial(chip: Chip, shape: Shape, most: int) -> Trial:
    n, k, group = shape
    table = table_for(chip, n, k, group)
    used = replace(next((e for e in table if most <= e.most), dequantize(most)), most=most)
    fitting = [e for e in candidates(most) if fits(chip, e, n, group)]
    plans = {plan_entry(chip, e, most, n, k, group): e for e in (*fitting, used)}
    return Trial(most, plans, plan_entry(chip, used, most, n, k, group))


def dequantize(most: int, chunk: int = 0) -> Entry:
    return Entry(most, "dequantize", 64, 1, chunk, 4, 1)


def fits(chip: Chip, entry: Entry, n: int, group: int) -> bool:
    runs = paired_runs(chip, group) if entry.kind == "paired" else n % (OUTPUTS * entry.rows) == 0
    return runs and shared_bytes(entry) <= chip.shared_memory


def variant(plan: TilePlan) -> TilePlan:
    """A plan with the same compiled kernel."""
    splits = 1 if plan.kind == "paired" else min(plan.splits, 2)
    return replace(plan, tiles=1, splits=splits, share=1)


def compile_variant(job: tuple[TilePlan, int]) -> None:
    """One of `variant` and a group, into Triton's cache."""
    plan, group = job
    device = torch.device("cuda")
    if plan.kind == "dequantize":
        return
    if plan.kind == "paired":
        from qengine_kernels.wna16_gemm.paired_launcher import source

        cached_cubin(source(plan.rows, plan.block_m, plan.num_stages, group, torch.bfloat16, torch.float16, False))
        return
    constants = tile_constants(plan, group, torch.float16, Chip.of(device).sm) | overlap(device)
    bf16, parts = torch.bfloat16, torch.float32 if plan.splits > 1 else torch.bfloat16
    tiled_kernel.warmup(
        bf16, torch.int16, torch.int32, bf16, bf16, parts, torch.int32, 16, 4096, 4096, 4096, 1,
        HAS_BIAS=False, ASM=True, grid=(1,), **constants,
    )  # fmt: skip


def measure(shape: Shape, trials: Sequence[Trial], say: Callable[[str], None]) -> list[Found]:
    n, k, group = shape
    weights = [random_weight(n, k, group or k) for _ in range(copies(n * k // 2))]
    meaning = dequantize_reference(weights[0].packed())
    found = []
    for t in trials:
        x = torch.randn(t.most, k, device="cuda", dtype=torch.bfloat16)
        want = x.float() @ meaning
        times: dict[TilePlan, float] = {}
        for plan in t.entries:
            calls = [partial(run_plan, x, weight, None, plan) for weight in weights]
            wrong = error(calls[0](), want)
            if wrong < LIMIT:
                times[plan] = graph_us(calls, replays=3)
            else:
                say(f"N {n} K {k}: {plan} is left out, relative error {wrong:.3g}")
        best = min(times, key=lambda plan: times[plan])
        found.append(Found(t.entries[best], times[best], times.get(t.used, float("nan"))))
        say(f"N {n} K {k} up to {t.most} rows: {times[best]:.1f} us ({found[-1].used_us:.1f} with what is in use)")
    return found


def random_weight(n: int, k: int, group: int) -> TiledWeight:
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(k // group, n, device="cuda") * 0.05 + 0.01).half()
    zeros = torch.randint(0, 16, (k // group, n), dtype=torch.uint8, device="cuda")
    return to_tiles(PackedWeight(pack_codes(codes), scales, zeros, k, group))
