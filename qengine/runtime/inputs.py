"""From a scheduled step to tensors: token ids, positions, block tables, slots. Numpy on the host, one copy a step.

The newest token of a sequence may have been sampled by a step whose result has not reached the host. Its id is then
gathered on the device from what that step sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from qengine.core.request import Request
from qengine.core.step import ScheduledSequence, Step
from qengine.layers.batch import Batch, GroupBatch
from qengine.runtime.staging import Part, Staging, float64, int32, int64, offsets

WIDTH_STEP = 16
"""Block tables are as wide as a multiple of this: kernels are compiled for strides that are."""


@dataclass(slots=True)
class TableRow:
    """A request's row in the kept block tables.

    expected     the position where the request goes on if nothing was preempted or remapped in between
    sampled_row  its row among what the step before sampled
    """

    row: int
    expected: int = -1
    changes: int = -1
    preemptions: int = 0
    sampled_row: int = -1


@dataclass
class StepInputs:
    """`sample_rows` are the token rows whose logits are needed, one for each sampling sequence (`sampling`), in step
    order. `uniforms`: what the sampler asked to be sent.

    `fixed`: for a step of decodes alone, the bytes of `fixed_parts`, padded; else None.
    """

    token_ids: torch.Tensor
    batch: Batch
    sample_rows: torch.Tensor
    sampling: list[Request] = field(default_factory=list)
    uniforms: torch.Tensor | None = None
    fixed: torch.Tensor | None = None


def fixed_parts(rows: int, num_groups: int) -> list[Part]:
    """The first arrays of a step of decodes that a graph replays, for `rows` sequences."""
    slots = [int64(f"slots{g}", rows) for g in range(num_groups)]
    return [int64("token_ids", rows), int64("positions", rows), *slots, int32("seq_lens", rows)]


def tokens_of(request: Request, start: int, count: int) -> list[int]:
    """`count` known tokens from position `start` on, without copying the whole sequence."""
    prompt, output = request.prompt_token_ids, request.output_token_ids
    n = len(prompt)
    if start >= n:
        return output[start - n : start - n + count]
    end = start + count
    return prompt[start:end] if end <= n else prompt[start:] + output[: end - n]


class InputBuilder:
    """Builds `StepInputs`, which are valid until the step after next. Keeps a row of the block tables for each request
    that it has seen; `forget` drops finished ones.

    `fixed_rows`: steps of at most so many decodes, and nothing else, are padded to it, for a graph; 0: none are.
    """

    def __init__(self, block_size: int, num_groups: int, device: torch.device) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.device = device
        self.fixed_rows = 0
        self.rows: dict[str, TableRow] = {}
        self.staging = Staging(device)
        self._free: list[int] = []
        self._tables = [np.zeros((0, WIDTH_STEP), dtype=np.int32) for _ in range(num_groups)]

    def forget(self, request_id: str) -> None:
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.row)

    def build(
        self, step: Step, sampled: torch.Tensor | None = None, uniforms: np.ndarray | None = None
    ) -> StepInputs:
        """`sampled` int64: what the step before this one sampled, on the device. `uniforms` float64: numbers that the
        sampler wants there as well."""
        sequences = step.sequences
        count = len(sequences)
        lens = [s.num_new_tokens for s in sequences]
        ends = [s.start + s.num_new_tokens for s in sequences]
        rows = [self._row(s) for s in sequences]
        sampling = [i for i, s in enumerate(sequences) if s.samples]
        total = sum(lens)
        decodes = total == count == len(sampling)
        padded = self.fixed_rows if decodes and count <= self.fixed_rows else 0
        width = -(-max(ends) // self.block_size)
        width = -(-width // WIDTH_STEP) * WIDTH_STEP
        ids, targets, sources = _token_ids(sequences, rows)
        parts = [
            *fixed_parts(padded or total, self.num_groups),
            int32("query_start", count + 1),
            int64("sample_rows", len(sampling)),
            int64("targets", len(targets)),
            int64("sources", len(sources)),
            float64("uniforms", 0 if uniforms is None else len(uniforms)),
            *(int32(f"table{g}", count, width) for g in range(self.num_groups)),
        ]
        a = self.staging.lay_out(parts)
        a["token_ids"][:total] = ids
        a["seq_lens"][:count] = ends
        a["targets"][:], a["sources"][:] = targets, sources
        query_start = a["query_start"]
        query_start[0] = 0
        np.cumsum(lens, out=query_start[1:])
        a["sample_rows"][:] = query_start[1:][sampling] - 1
        if uniforms is not None:
            a["uniforms"][:] = uniforms
        index = np.fromiter((row.row for row in rows), dtype=np.int64, count=count)
        self._place(a, index, lens, total, padded)
        return self._sent(sequences, sampling, lens, ends, padded, sampled)

    def _place(
        self, a: Mapping[str, np.ndarray], index: np.ndarray, lens: list[int], total: int, padded: int
    ) -> None:
        """Fill in positions, block tables (rows `index` of the kept ones) and slots, and what pads a fixed step."""
        count, query_start, ends = len(lens), a["query_start"], a["seq_lens"][: len(lens)].astype(np.int64)
        if total == count:
            owner = np.arange(count)
            positions = ends - 1
        else:
            owner = np.repeat(np.arange(count), lens)
            first = ends - np.array(lens, dtype=np.int64)
            positions = np.arange(total, dtype=np.int64) + (first - query_start[:-1])[owner]
        a["positions"][:total] = positions
        block, inside = np.divmod(positions, self.block_size)
        for g, kept in enumerate(self._tables):
            table = a[f"table{g}"]
            narrow = min(table.shape[1], kept.shape[1])
            table[:, :narrow] = kept[index, :narrow]
            table[:, narrow:] = 0
            a[f"slots{g}"][:total] = table[owner, block].astype(np.int64) * self.block_size + inside
        if padded:
            for g in range(self.num_groups):
                a[f"slots{g}"][count:] = -1
            a["seq_lens"][count:] = 0
            a["token_ids"][count:] = a["positions"][count:] = 0

    def _sent(
        self,
        sequences: Sequence[ScheduledSequence],
        sampling: Sequence[int],
        lens: list[int],
        ends: list[int],
        padded: int,
        sampled: torch.Tensor | None,
    ) -> StepInputs:
        """Everything on the device, the ids that are known only there filled in."""
        t = self.staging.send()
        total, count = sum(lens), len(sequences)
        token_ids = t["token_ids"][:total]
        if len(t["targets"]):
            assert sampled is not None, "a sequence goes on from a token that no step has sampled"
            token_ids.index_copy_(0, t["targets"], sampled.index_select(0, t["sources"]))
        for row, i in enumerate(sampling):
            self.rows[sequences[i].request.request_id].sampled_row = row
        batch = Batch(
            num_tokens=total,
            num_seqs=count,
            num_decodes=_leading_decodes(lens),
            positions=t["positions"][:total],
            query_start=t["query_start"],
            seq_lens=t["seq_lens"][:count],
            host_query_lens=lens,
            host_seq_lens=ends,
            groups=[GroupBatch(t[f"table{g}"], t[f"slots{g}"][:total]) for g in range(self.num_groups)],
            block_size=self.block_size,
        )
        fixed = self.staging.head(offsets(fixed_parts(padded, self.num_groups))[1]) if padded else None
        requests = [sequences[i].request for i in sampling]
        return StepInputs(token_ids, batch, t["sample_rows"], requests, t["uniforms"], fixed)

    def _row(self, s: ScheduledSequence) -> TableRow:
        """The request's row, brought up to date: blocks before the first written one cannot have changed unless the
        request was preempted or has just been admitted."""
        request = s.request
        row = self.rows.get(request.request_id)
        if row is None:
            row = self.rows[request.request_id] = TableRow(self._take())
        if (
            row.changes != request.table_changes
            or row.expected != s.start
            or row.preemptions != request.num_preemptions
        ):
            whole = row.expected != s.start or row.preemptions != request.num_preemptions
            self._copy(row.row, request, 0 if whole else s.start // self.block_size)
            row.changes, row.preemptions = request.table_changes, request.num_preemptions
        row.expected = s.start + s.num_new_tokens
        return row

    def _copy(self, row: int, request: Request, first: int) -> None:
        """Copy the request's block tables from block `first` on."""
        for g, table in enumerate(request.block_tables):
            kept = self._tables[g]
            if len(table) > kept.shape[1]:
                more = np.zeros((len(kept), 1 << (len(table) - 1).bit_length()), dtype=np.int32)
                more[:, : kept.shape[1]] = kept
                self._tables[g] = kept = more
            kept[row, first : len(table)] = table[first:]
            kept[row, len(table) :] = 0

    def _take(self) -> int:
        if not self._free:
            old = len(self._tables[0]) if self._tables else 0
            new = max(16, 2 * old)
            self._tables = [np.concatenate([t, np.zeros((new - old, t.shape[1]), np.int32)]) for t in self._tables]
            self._free = list(range(new - 1, old - 1, -1))
        return self._free.pop()


def _token_ids(
    sequences: Sequence[ScheduledSequence], rows: Sequence[TableRow]
) -> tuple[list[int], list[int], list[int]]:
    """The ids that are known (0 for others), where the others belong, and their rows among what was sampled last."""
    ids: list[int] = []
    targets: list[int] = []
    sources: list[int] = []
    for s, row in zip(sequences, rows, strict=True):
        request, count = s.request, s.num_new_tokens
        output, num_prompt = request.output_token_ids, len(request.prompt_token_ids)
        at = s.start - num_prompt
        if count == 1 and 0 <= at < len(output):
            ids.append(output[at])
            continue
        known = tokens_of(request, s.start, count)
        ids += known
        if len(known) < count:
            targets.append(len(ids))
            sources.append(row.sampled_row)
            ids.append(0)
    return ids, targets, sources


def _leading_decodes(query_lens: Sequence[int]) -> int:
    for i, n in enumerate(query_lens):
        if n != 1:
            return i
    return len(query_lens)
