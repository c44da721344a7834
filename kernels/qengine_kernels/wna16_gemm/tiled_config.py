"""Which kernel runs a linear over tiled codes at M rows, and how: pure functions of shapes and chip.

The tables are what `qengine tune --shapes 28672x4096,4096x14336,6144x4096,4096x4096` found on an NVIDIA H200 with
triton 3.6; where the last two shapes disagree, the entry that loses less on the other; without sm_90's own kernel where
that does not run. Other chips take the same
entries as far as their shared memory goes; there `qengine tune` measures others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qengine_kernels.launch import Chip, ceil_div
from qengine_kernels.wna16_gemm.config import SCRATCH_BYTES, Route
from qengine_kernels.wna16_gemm.tiles import INPUTS, OUTPUTS

Kind = Literal["few", "many", "wide", "dequantize"]
"""Kernels of `tiled_kernel`, that of `wide_kernel` (sm_90), or a library GEMM over dequantised weights."""


@dataclass(frozen=True)
class Entry:
    """Tiles for up to `most` rows of x. `columns`: the most columns of words in a step, 4 inputs each; `fill`: how many
    programs a multiprocessor should get where K is split for want of output tiles. Of "wide", which has one, `fill` is
    what it gets: whole tiles (0), equal numbers of steps wherever tiles end (1), an equal part of a tile (2), or what
    is reckoned to be fastest of these (3). Of "dequantize" only `block_m` means something: how many outputs are
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

MANY_ROWS = (Entry(64, "wide", 16, 4, 64, 4, 6), Entry(2048, "wide", 16, 4, 128, 4, 6))
"""What sm_90 takes instead for more than 32 rows of x; in the place of NARROW, for more than 128."""

TUNED: dict[tuple[Chip, int, int, int], tuple[Entry, ...]] = {}
"""Tables that were measured on this machine, by chip, N, K and group (see `tune.py`)."""
MOST_SPLITS = 8
LEAST_INPUTS = 512
"""Of a split: fewer are not worth the joining."""
EQUAL_JOIN, ALIGNED_JOIN = 26, 12
"""What it costs programs of `wide_kernel` to share tiles, in steps, as measured on an H200."""


@dataclass(frozen=True)
class TilePlan:
    """One launch: output tiles of 64 * rows outputs and block_m rows of x, each shared by `splits` programs that take
    `share` steps of `parts` times 4 * columns inputs. Of kind "wide", `tiles` are programs, which take `share` steps
    each wherever tiles end; with `splits` 2 they may leave parts of up to two tiles that they share with others."""

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
    if not wide_runs(chip, n, group):
        return table
    few = [e for e in table if e.most < (64 if wide or deep else 256)]
    return (*few, *(e for e in MANY_ROWS if e.most > few[-1].most))


def plan_entry(chip: Chip, entry: Entry, m: int, n: int, in_features: int, group: int) -> TilePlan:
    """The launch for x [m, in_features] with the tiles of `entry`, smaller ones where the chip or the shape need it."""
    if entry.kind == "dequantize":
        return plan_dequantize(in_features, group, entry.block_m)
    rows = entry.rows if n % (OUTPUTS * entry.rows) == 0 else 1
    entry = fit(chip, replace(entry, rows=rows))
    if entry.kind == "wide":
        return plan_wide(chip, entry, m, n, in_features)
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


def plan_wide(chip: Chip, entry: Entry, m: int, n: int, in_features: int) -> TilePlan:
    """At most a program a multiprocessor: those that share a tile wait for each other."""
    steps = in_features // INPUTS
    tiles = n // (OUTPUTS * entry.rows) * ceil_div(m, entry.block_m)
    least = max(LEAST_INPUTS // INPUTS, ceil_div(steps, MOST_SPLITS))
    whole = ceil_div(tiles, chip.multiprocessors) * steps
    equal = min(whole, max(least, ceil_div(tiles * steps, chip.multiprocessors)))
    parts = range(min(chip.multiprocessors // tiles, steps // least), 1, -1)
    aligned = next((steps // count for count in parts if steps % count == 0), whole)
    shares = (whole, equal, aligned)
    if entry.fill < 3:
        share = shares[entry.fill]
    else:  # joining takes as long as these numbers of steps
        share = min(zip(shares, (0, EQUAL_JOIN, ALIGNED_JOIN), strict=True), key=sum)[0]
    return TilePlan(
        "wide", 16, 1, entry.rows, entry.block_m, entry.num_warps, entry.num_stages,
        ceil_div(tiles * steps, share), 2 if entry.fill else 1, share,
    )  # fmt: skip


def wide_runs(chip: Chip, n: int, group: int) -> bool:
    """Whether `wide_kernel` serves a weight: sm_90's matrix units and loads, whole pairs of its tiles, and steps that
    lie in one group."""
    return chip.sm == 90 and n % (4 * OUTPUTS) == 0 and group % 64 == 0


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
    if entry.kind == "wide":  # x, words, scales and barriers of each stage, and a part of the result
        return entry.num_stages * (128 * entry.block_m + 9216 + 16) + 16384
    outputs = OUTPUTS * entry.rows
    step = 2 * entry.columns * outputs + 8 * entry.columns * entry.block_m + 32 * outputs
    return max(entry.num_stages * step, 4 * outputs * entry.block_m) + 1024


def chunk_of(out_features: int, in_features: int, itemsize: int, wanted: int = 0) -> int:
    """Outputs that are dequantised at a time for a library GEMM: those wanted, at most what SCRATCH_BYTES hold. Where
    the second-level cache has room for them, the GEMM finds them there and the next ones take their place."""
    most = max(SCRATCH_BYTES // (in_features * itemsize) // OUTPUTS, 1) * OUTPUTS
    return min(out_features, most, wanted or most)
