"""Which rows each part of a step reads, with what mask: made once a step, used by every layer of a group.

Only tokens of the sequence itself are ever read: gathering goes by token, not by block, and padding points at the
null block, whose contents are zero. So a NaN in a neighbour or in a stale slot cannot get in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qengine_kernels.cpu_attention.rows import Maps, rows_of

DECODE_ELEMENTS = 1 << 17
"""K and V elements gathered at a time on one thread: 512 KiB of float32, so that gather, decode and both products stay
in the second-level cache. Measured with 16 sequences of 300 tokens (3 heads of 64): the stages are memory-bound
beyond it."""
PARALLEL_ELEMENTS = 1 << 22
"""The same with several threads: each operation wakes them anew, so few large ones are better."""
SERIAL_ELEMENTS = 1 << 20
"""Up to this many gathered elements a decode runs on one thread: waking the others for each of its five operations
(about 60 us each) would cost more than they save."""
PADDING = 0.75
"""Least share of real tokens in a batch of decodes of unequal length."""
QUERY_TILE = 512
"""Prompt rows at a time; bounds masks at QUERY_TILE * cached tokens."""
SCORE_ELEMENTS = 1 << 24
"""Scores held at once where they must be held at all (soft cap): 64 MiB of float32."""


@dataclass
class DecodePart:
    """Decodes first..last-1 in sorted order: `rows` for each of the layer's maps, of [sides, batch, length, pieces];
    `mask` float [batch, 1, 1, length] (0 or -inf), None when all have the full length."""

    first: int
    last: int
    length: int
    rows: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None


@dataclass
class PrefillPart:
    """Query tokens first..last-1 of one sequence against `length` keys; `mask` float [queries, length], or None for
    plain causal (queries and keys are the same tokens)."""

    first: int
    last: int
    length: int
    rows: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None


@dataclass
class Plan:
    """`order` sorts the decodes by length and `back` undoes it; None when they are in order. `one_thread`: the decodes
    gather so little that one thread is faster."""

    num_decodes: int
    order: torch.Tensor | None
    back: torch.Tensor | None
    decodes: list[DecodePart]
    prefills: list[PrefillPart]
    one_thread: bool
    alone: DecodePart | None = None
    """The only part of the step, where there are no others, nothing was sorted and threads stay as they are."""


def write_rows(batch: Any, group: int, maps: Maps) -> tuple[torch.Tensor, ...]:
    """For each map, flat row indices of [sides, num_tokens, pieces] where this step's K and V go."""
    slots = batch.groups[group].slot_mapping
    size = batch.block_size
    return rows_of(maps, torch.div(slots, size, rounding_mode="floor"), slots % size)


def make_plan(batch: Any, group: int, spec: Any, maps: Maps, threads: int) -> Plan:
    tables = batch.groups[group].block_tables.long()
    n = batch.num_decodes
    width = 2 * spec.num_kv_heads * spec.head_dim
    limit = DECODE_ELEMENTS if threads == 1 else PARALLEL_ELEMENTS
    window = spec.sliding_window
    decode_lens = batch.host_seq_lens[:n]
    counts = [c if window is None else min(c, window) for c in decode_lens]
    order = sorted(range(n), key=counts.__getitem__)
    in_order = order == list(range(n))
    sorted_counts = [counts[i] for i in order]
    decodes = []
    if n:
        index = None if in_order else torch.tensor(order)
        first_key = torch.tensor([decode_lens[i] - counts[i] for i in order])
        table = tables[:n] if index is None else tables[index]
        blocks, offsets = token_slots(table, first_key, torch.tensor(sorted_counts), batch.block_size)
        for a, b in cut(sorted_counts, max(limit // width, 1)):
            length = sorted_counts[b - 1]
            part_rows = rows_of(maps, blocks[a:b, :length], offsets[a:b, :length])
            decodes.append(DecodePart(a, b, length, part_rows, length_mask(sorted_counts[a:b], length)))
    else:
        index = None
    back = None if index is None else torch.empty_like(index).scatter_(0, index, torch.arange(n))
    prefills = prefill_parts(batch, tables, spec, maps)
    few = sum(counts) * width <= SERIAL_ELEMENTS
    out = Plan(n, index, back, decodes, prefills, few)
    if in_order and len(decodes) == 1 and not prefills and (threads == 1 or not few):
        out.alone = decodes[0]
    return out


def token_slots(
    table: torch.Tensor, first: torch.Tensor, counts: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of tokens first..first+count-1 of each sequence, int64 [n, max count]; padding is (0, 0)."""
    step = torch.arange(int(counts.max()))
    position = first[:, None] + step
    inside = step < counts[:, None]
    position = position.masked_fill_(~inside, 0)
    blocks = table.gather(1, torch.div(position, block_size, rounding_mode="floor"))
    return blocks.masked_fill_(~inside, 0), (position % block_size)


def cut(counts: list[int], most: int) -> list[tuple[int, int]]:
    """Cut ascending counts into runs whose padded size stays within `most` tokens and whose padding stays small."""
    out, start, real = [], 0, 0
    for i, c in enumerate(counts):
        padded = (i - start + 1) * c
        if i > start and (padded > most or real + c < PADDING * padded):
            out.append((start, i))
            start, real = i, 0
        real += c
    return [*out, (start, len(counts))]


def length_mask(counts: list[int], length: int) -> torch.Tensor | None:
    if counts[0] == length:
        return None
    hidden = torch.arange(length) >= torch.tensor(counts)[:, None]
    return torch.zeros(len(counts), 1, 1, length).masked_fill_(hidden[:, None, None], float("-inf"))


def prefill_parts(batch: Any, tables: torch.Tensor, spec: Any, maps: Maps) -> list[PrefillPart]:
    parts = []
    first = batch.num_decodes
    for s in range(batch.num_decodes, batch.num_seqs):
        n, cached = batch.host_query_lens[s], batch.host_seq_lens[s]
        for begin, end in query_tiles(n, cached, spec):
            position = cached - n + begin
            stop = cached - n + end
            oldest = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
            keys = torch.arange(oldest, stop)
            blocks = tables[s].index_select(0, torch.div(keys, batch.block_size, rounding_mode="floor"))
            part_rows = rows_of(maps, blocks, keys % batch.block_size)
            mask = causal_mask(position, end - begin, keys, spec.sliding_window)
            parts.append(PrefillPart(first + begin, first + end, stop - oldest, part_rows, mask))
        first += n
    return parts


def query_tiles(n: int, cached: int, spec: Any) -> list[tuple[int, int]]:
    tile = QUERY_TILE
    if spec.soft_cap is not None:
        tile = min(tile, max(16, SCORE_ELEMENTS // (spec.num_heads * cached)))
    return [(a, min(a + tile, n)) for a in range(0, n, tile)]


def causal_mask(position: int, n: int, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """float [n, keys]: queries at position.. see keys up to their own, `window` of them. None: plain causal."""
    if position == 0 and (window is None or n <= window):
        return None
    query = position + torch.arange(n)[:, None]
    hidden = keys > query
    if window is not None:
        hidden |= keys <= query - window
    return torch.zeros(n, keys.numel()).masked_fill_(hidden, float("-inf"))
