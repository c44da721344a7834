"""Which kernel runs a linear over tiled codes at M rows, and how: pure functions of shapes and chip.

The tables are what `qengine tune --shapes 28672x4096,4096x14336,6144x4096,4096x4096` found on an NVIDIA H200 with
triton 3.6; where the last two shapes disagree, the entry that loses less on the other; without sm_90's own kernel where
that does not run. Other chips take the same entries as far as their shared memory goes; there `qengine tune` measures
others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qengine_kernels.launch import Chip, ceil_div
from qengine_kernels.wna16_gemm.config import SCRATCH_BYTES, Route
from qengine_kernels.wna16_gemm.tiles import INPUTS, OUTPUTS

Kind = Literal["few", "many", "paired", "dequantize"]
"""Kernels of `tiled_kernel`, that of `paired.cu` (sm_90), or a library GEMM over dequantised weights."""


@dataclass(frozen=True)
class Entry:
    """Tiles for up to `most` rows of x. `columns`: the most columns of words in a step, 4 inputs each; `fill`: how many
    programs a multiprocessor should get where K is split for want of output tiles. "paired" takes `rows`, 1 to 4, and
    `block_m` (0: the tiles that are reckoned to be fastest), and with a `fill` of 1 two programs share each of the last
    tiles where those are too few for all. Of "dequantize" only `block_m` means something: how many outputs are
    dequantised at a time, 0 for as many as SCRATCH_BYTES hold."""

    most: int
    kind: Kind
    columns: int
    rows: int
    block_m: int
    num_warps: int
    num_stages: int
    fill: int = 3


WIDE = (
    Entry(8, "few", 64, 2, 8, 4, 3),
    Entry(16, "many", 32, 2, 16, 4, 4),
    Entry(32, "many", 32, 2, 32, 4, 4),
    Entry(64, "many", 32, 2, 64, 4, 4),
    Entry(256, "many", 16, 2, 128, 4, 4),
    Entry(512, "many", 16, 2, 128, 8, 4),
)
"""Where there are output tiles for every multiprocessor."""

NARROW = (
    Entry(8, "few", 32, 2, 8, 4, 3),
    Entry(16, "many", 32, 1, 16, 4, 4),
    Entry(32, "many", 32, 1, 32, 4, 4),
    Entry(128, "many", 32, 1, 64, 4, 3),
    Entry(256, "many", 32, 1, 64, 4, 3),
    Entry(512, "many", 16, 1, 128, 4, 4),
)
"""Elsewhere: smaller tiles, and K split among programs."""

DEEP = (
    Entry(8, "few", 32, 2, 8, 4, 4, 4),
    Entry(16, "many", 32, 2, 16, 4, 4),
    Entry(32, "many", 32, 2, 32, 4, 3),
    Entry(64, "many", 32, 2, 64, 4, 3),
    Entry(128, "many", 16, 2, 128, 4, 4),
    Entry(256, "many", 16, 2, 64, 4, 4),
    Entry(512, "many", 16, 2, 256, 8, 4, 1),
)
"""The same where K is large beside N."""

PAIRED = Entry(1 << 30, "paired", 16, 0, 0, 4, 0)
"""What sm_90 takes instead for more than 64 rows of x, or 32 where the others split K."""

PAIRED_STEPS = {
    (1, 96): 0.191, (1, 128): 0.217, (2, 96): 0.316, (2, 128): 0.375, (2, 160): 0.43, (2, 192): 0.518,
    (2, 224): 0.605, (2, 256): 0.693, (3, 96): 0.459, (3, 128): 0.523, (3, 160): 0.647, (3, 192): 0.773,
}  # fmt: skip
"""(64 outputs, rows of x) of a tile -> microseconds that 64 inputs take in `paired.cu`."""
PAIRED_TILE, PAIRED_JOIN = 0.94, 1.86
"""Microseconds of writing out a tile, and of joining two programs' sums. All of these were fitted to whole launches on
an H200, of the four shapes and 21 numbers of rows from 65 to 4,096; what a launch costs besides made no difference."""

TUNED: dict[tuple[Chip, int, int, int], tuple[Entry, ...]] = {}
"""Tables that were measured on this machine, by chip, N, K and group (see `tune.py`)."""
MOST_SPLITS = 8
LEAST_INPUTS = 512
"""Of a split: fewer are not worth the joining."""


@dataclass(frozen=True)
class TilePlan:
    """One launch: output tiles of 64 * rows outputs and block_m rows of x, each shared by `splits` programs that take
    `share` steps of `parts` times 4 * columns inputs. Of kind "paired", two programs take a pair of tiles at a time,
    `share` pairs in all, and then share each of `tiles - share` single ones."""

    kind: Kind
    columns: int
    parts: int
    rows: int
    block_m: int
    num_warps: int
    num_stages: int
    tiles: int
    splits: int
    share: int

    @property
    def elements(self) -> int:
        """Of the splits' float32 results."""
        return self.tiles * self.splits * OUTPUTS * self.rows * self.block_m


def plan_tiles(chip: Chip, m: int, n: int, in_features: int, group: int, route: Route | None = None) -> TilePlan:
    """The launch for x [m, in_features]; `group` as in `TiledWeight`, `route` as for `wna16_matmul`."""
    table = table_for(chip, n, in_features, group)
    if route == "dequantize" or (route is None and m > table[-1].most):
        return plan_dequantize(in_features, group)
    fused = table if route is None else [e for e in table if e.kind != "dequantize"]
    entry = next((e for e in fused if m <= e.most), fused[-1])
    return plan_entry(chip, entry, m, n, in_features, group)


def plan_dequantize(in_features: int, group: int, chunk: int = 0) -> TilePlan:
    """A library GEMM over weights that are dequantised `chunk` outputs at a time (see `chunk_of`)."""
    return TilePlan("dequantize", *whole_groups(64, in_features, group, 1), 1, chunk, 4, 1, 0, 1, 0)


def table_for(chip: Chip, n: int, in_features: int, group: int) -> tuple[Entry, ...]:
    """What was measured for this shape on this chip, else the built-in table for its proportions."""
    if found := TUNED.get((chip, n, in_features, group)):
        return found
    wide, deep = n // (2 * OUTPUTS) >= chip.multiprocessors, in_features >= 2 * n
    table = WIDE if wide else DEEP if deep else NARROW
    if not paired_runs(chip, group):
        return table
    return (*(e for e in table if e.most <= (64 if wide else 32)), PAIRED)


def plan_entry(chip: Chip, entry: Entry, m: int, n: int, in_features: int, group: int) -> TilePlan:
    """The launch for x [m, in_features] with the tiles of `entry`, smaller ones where the chip or the shape need it."""
    if entry.kind == "dequantize":
        return plan_dequantize(in_features, group, entry.block_m)
    if entry.kind == "paired":
        if entry.block_m:
            return plan_paired(chip, entry.rows, entry.block_m, entry.fill == 1, m, n, in_features)
        plans = [plan_paired(chip, *tile, fill, m, n, in_features) for tile in PAIRED_STEPS for fill in (False, True)]
        return min(plans, key=lambda plan: paired_us(chip, plan, in_features))
    rows = entry.rows if n % (OUTPUTS * entry.rows) == 0 else 1
    entry = fit(chip, replace(entry, rows=rows))
    columns, parts = whole_groups(entry.columns, in_features, group, 2)
    tiles = n // (OUTPUTS * entry.rows) * ceil_div(m, entry.block_m)
    steps = in_features // (4 * columns * parts)
    want = entry.fill * chip.multiprocessors // tiles
    want = max(1, min(want, MOST_SPLITS, in_features // LEAST_INPUTS))
    share = ceil_div(steps, want)
    return TilePlan(
        entry.kind, columns, parts, entry.rows, entry.block_m, entry.num_warps, entry.num_stages,
        tiles, ceil_div(steps, share), share,
    )  # fmt: skip


def plan_paired(chip: Chip, rows: int, block_m: int, sharing: bool, m: int, n: int, in_features: int) -> TilePlan:
    """Pairs of tiles for pairs of programs; with `sharing`, where the last pairs are for at most half of the programs,
    each of their tiles for two of them."""
    pairs = ceil_div(n, 2 * rows * OUTPUTS) * ceil_div(m, block_m)
    programs = max(chip.multiprocessors // 2, 1)  # pairs of them that run at a time
    left = pairs % programs
    if not sharing or 2 * left > programs or in_features <= INPUTS * paired_depth(block_m):
        left = 0
    fixed = paired_bytes(rows, block_m, 0)
    stages = min(8, (chip.shared_memory - fixed) // (paired_bytes(rows, block_m, 1) - fixed))
    return TilePlan(
        "paired", 16, 1, rows, block_m, 4, stages, pairs + left, 2 if left else 1, pairs - left
    )  # fmt: skip


def paired_us(chip: Chip, plan: TilePlan, in_features: int) -> float:
    """What a plan of kind "paired" is reckoned to take; programs that wait for others count as those they wait for."""
    step, programs = PAIRED_STEPS[plan.rows, plan.block_m], max(chip.multiprocessors // 2, 1)
    tiles = ceil_div(plan.share, programs)
    us = tiles * (in_features // INPUTS * step + PAIRED_TILE)
    if plan.splits > 1:
        us += in_features // INPUTS * step / 2 + PAIRED_TILE + PAIRED_JOIN
    return us


def paired_bytes(rows: int, block_m: int, stages: int) -> int:
    """Shared memory of `paired.cu`: x, words, scales and two barriers of each stage; results on their way out and a
    barrier."""
    return stages * (paired_depth(block_m) * (2 * INPUTS * block_m + rows * (2048 + 256)) + 16) + 4096 * rows + 8


def paired_depth(block_m: int) -> int:
    """Times 64 inputs that `paired.cu` has in one stage."""
    return 2 if block_m <= 160 else 1


def paired_runs(chip: Chip, group: int) -> bool:
    """Whether `paired.cu` serves a weight: sm_90's matrix units, copy engine and clusters, and steps that lie in one
    group."""
    return chip.sm == 90 and group % INPUTS == 0


def whole_groups(columns: int, in_features: int, group: int, most_parts: int) -> tuple[int, int]:
    """(columns of a part, parts of a step) of at most so many columns in all, a power of two: steps fill K, and each
    part lies in one group, or is a tile."""
    while columns > 16 and in_features % (4 * columns):
        columns //= 2
    part = columns
    while part > 16 and group and group % (4 * part):
        part //= 2
    return part, min(columns // part, most_parts)


def fit(chip: Chip, entry: Entry) -> Entry:
    """The entry with what is too large for the chip made smaller. Tiles wider than 128 rows pay with the matrix units
    of sm_90, which take an operand from registers and another one from shared memory."""
    if chip.sm != 90 and entry.block_m > 128:
        entry = replace(entry, block_m=128)
    while shared_bytes(entry) > chip.shared_memory:
        if entry.num_stages > 2:
            entry = replace(entry, num_stages=entry.num_stages - 1)
        elif entry.columns > 16:
            entry = replace(entry, columns=entry.columns // 2)
        else:
            entry = replace(entry, block_m=entry.block_m // 2)
    return entry


def shared_bytes(entry: Entry) -> int:
    """An upper estimate of the kernel's shared memory: staged words, scales and x, or the result on its way out."""
    if entry.kind == "dequantize":
        return 0
    if entry.kind == "paired":  # as many stages as there is room for, at least three
        return paired_bytes(entry.rows, entry.block_m, 3)
    outputs = OUTPUTS * entry.rows
    step = 2 * entry.columns * outputs + 8 * entry.columns * entry.block_m + 32 * outputs
    return max(entry.num_stages * step, 4 * outputs * entry.block_m) + 1024


def chunk_of(out_features: int, in_features: int, itemsize: int, wanted: int = 0) -> int:
    """Outputs that are dequantised at a time for a library GEMM: those wanted, at most what SCRATCH_BYTES hold. Where
    the second-level cache has room for them, the GEMM finds them there and the next ones take their place."""
    most = max(SCRATCH_BYTES // (in_features * itemsize) // OUTPUTS, 1) * OUTPUTS
    return min(out_features, most, wanted or most)
