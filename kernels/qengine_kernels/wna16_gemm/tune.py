"""Measures tiles of 4-bit linears on this GPU, and writes and reads what was found.

A table is a JSON object: the chip, the versions it was measured with, and for each (N, K, group) the entries that
`tiled_config` takes instead of its own. Nothing is measured while serving.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from qengine_kernels.launch import Chip, power_of_2
from qengine_kernels.overlap import overlap
from qengine_kernels.timing import copies, error, graph_us
from qengine_kernels.wna16_gemm.layout import PackedWeight, pack_codes
from qengine_kernels.wna16_gemm.reference import dequantize_reference
from qengine_kernels.wna16_gemm.tiled_config import TUNED, Entry, TilePlan, plan_entry, shared_bytes, table_for
from qengine_kernels.wna16_gemm.tiled_kernel import tiled_kernel
from qengine_kernels.wna16_gemm.tiled_launcher import run_plan, tile_constants
from qengine_kernels.wna16_gemm.tiles import OUTPUTS, TiledWeight, to_tiles

ROWS = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of rows of x up to which an entry serves."""
LIMIT = 0.01
"""Relative error of a result in bfloat16 above which tiles are not taken."""


@dataclass(frozen=True)
class Found:
    """The fastest entry for up to `entry.most` rows, and what the table that was in use before takes."""

    entry: Entry
    us: float
    before_us: float


def candidates(most: int) -> Iterator[Entry]:
    """Entries worth a measurement for up to `most` rows."""
    if most <= 16:
        for columns, rows, stages, fill in product((32, 64), (1, 2), (3, 4), (2, 3, 4)):
            yield Entry(most, "few", columns, rows, most, 4, stages, fill)
    block_ms = {power_of_2(most, 16), max(most // 2, 16), max(most // 4, 16)}
    for block_m, rows, warps in product(sorted(b for b in block_ms if b <= 256), (1, 2), (4, 8)):
        sums = OUTPUTS * rows * block_m // (32 * warps)  # float32 a thread
        if 8 <= sums <= 128 and (warps == 4 or rows == 2):
            for (columns, stages), fill in product(((16, 4), (32, 3), (32, 4)), (1, 3)):
                yield Entry(most, "many", columns, rows, block_m, warps, stages, fill)


def tune(
    shapes: Sequence[tuple[int, int, int]], rows: Sequence[int], say: Callable[[str], None], processes: int
) -> dict[tuple[int, int, int], list[Found]]:
    """(N, K, group) of 4-bit weights -> an entry for each number of rows. Compiles in `processes` processes."""
    device = torch.device("cuda")
    chip = Chip.of(device)
    planned: dict[tuple[int, int, int], list[tuple[int, dict[TilePlan, Entry]]]] = {}
    for n, k, group in shapes:
        for m in rows:
            before = next((e for e in table_for(chip, n, k, group) if m <= e.most), None)
            entries = [*candidates(m), *([replace(before, most=m)] if before else [])]
            fitting = [e for e in entries if shared_bytes(e) <= chip.shared_memory and n % (OUTPUTS * e.rows) == 0]
            by_plan = {plan_entry(chip, e, m, n, k, group): e for e in fitting}
            planned.setdefault((n, k, group), []).append((m, by_plan))
    jobs = {(variant(plan), shape[2]) for shape, of in planned.items() for _, plans in of for plan in plans}
    say(f"{len(jobs)} kernels to compile in {processes} processes")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_variant, jobs))
    return {shape: measure(shape, of, say) for shape, of in planned.items()}


def variant(plan: TilePlan) -> TilePlan:
    """A plan with the same compiled kernel."""
    return replace(plan, tiles=1, splits=min(plan.splits, 2), share=1)


def compile_variant(job: tuple[TilePlan, int]) -> None:
    """One of `variant` and a group, into Triton's cache."""
    plan, group = job
    constants = tile_constants(plan, group, torch.float16) | overlap(torch.device("cuda"))
    bf16, parts = torch.bfloat16, torch.float32 if plan.splits > 1 else torch.bfloat16
    tiled_kernel.warmup(
        bf16, torch.int16, torch.int32, bf16, bf16, parts, torch.int32, 16, 4096, 4096, 4096, 1,
        HAS_BIAS=False, ASM=True, grid=(1,), **constants,
    )  # fmt: skip


def measure(
    shape: tuple[int, int, int], planned: Sequence[tuple[int, dict[TilePlan, Entry]]], say: Callable[[str], None]
) -> list[Found]:
    n, k, group = shape
    weights = [random_weight(n, k, group or k) for _ in range(copies(n * k // 2))]
    meaning = dequantize_reference(weights[0].packed())
    found = []
    for m, plans in planned:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        want = x.float() @ meaning
        times: dict[TilePlan, float] = {}
        for plan in plans:
            calls = [partial(run_plan, x, weight, None, plan) for weight in weights]
            wrong = error(calls[0](), want)
            if wrong < LIMIT:
                times[plan] = graph_us(calls, replays=3)
            else:
                say(f"N {n} K {k} M {m}: {plan} is left out, relative error {wrong:.3g}")
        best = min(times, key=lambda plan: times[plan])
        before = times.get(list(plans)[-1], float("nan"))
        found.append(Found(plans[best], times[best], before))
        say(f"N {n} K {k} M {m}: {times[best]:.1f} us, before {before:.1f}; {astuple(plans[best])}")
    return found


def random_weight(n: int, k: int, group: int) -> TiledWeight:
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(k // group, n, device="cuda") * 0.05 + 0.01).half()
    zeros = torch.randint(0, 16, (k // group, n), dtype=torch.uint8, device="cuda")
    return to_tiles(PackedWeight(pack_codes(codes), scales, zeros, k, group))


def save(path: Path, found: dict[tuple[int, int, int], list[Found]]) -> None:
    chip = Chip.of(torch.device("cuda"))
    tables = [
        {"n": n, "k": k, "group": group, "entries": [list(astuple(f.entry)) for f in of]}
        for (n, k, group), of in found.items()
    ]
    about = {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"chip": asdict(chip), "measured": about, "tables": tables}, indent=1) + "\n")


def use(path: Path) -> str:
    """Take a table for every launch from now on. Returns what it is, for a report. Raises ValueError for a file that
    is no such table, or of another chip."""
    try:
        value = json.loads(path.read_text())
        chip = Chip(**value["chip"])
        tables = {
            (chip, t["n"], t["k"], t["group"]): tuple(Entry(*entry) for entry in t["entries"]) for t in value["tables"]
        }
        about = value["measured"]
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is no table of tiles: {type(e).__name__} {e}") from e
    here = Chip.of(torch.device("cuda"))
    if chip != here:
        raise ValueError(f"{path} is of another chip: have {chip}, this one is {here}")
    TUNED.update(tables)
    return f"{len(tables)} shapes measured on {about['device']} with triton {about['triton']} ({path})"
