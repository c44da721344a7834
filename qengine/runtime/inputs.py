"""From a scheduled step to tensors: token ids, positions, block tables, slots. Numpy on the host, one copy each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from qengine.core.request import Request
from qengine.core.step import ScheduledSequence, Step
from qengine.layers.batch import Batch, GroupBatch


@dataclass
class TableRow:
    """A request's block tables as arrays, kept between steps so that a decode step writes only what changed.

    `expected` is the position where the request goes on if nothing was preempted or remapped in between.
    """

    tables: list[np.ndarray]
    counts: list[int]
    expected: int = 0
    preemptions: int = 0


@dataclass
class StepInputs:
    """`sample_rows` are the token rows whose logits are needed, one for each sampling sequence, in step order."""

    token_ids: torch.Tensor
    batch: Batch
    sample_rows: torch.Tensor
    sampling: list[Request] = field(default_factory=list)


def tokens_of(request: Request, start: int, count: int) -> list[int]:
    """`count` known tokens from position `start` on, without copying the whole sequence."""
    prompt, output = request.prompt_token_ids, request.output_token_ids
    n = len(prompt)
    if start >= n:
        return output[start - n : start - n + count]
    end = start + count
    return prompt[start:end] if end <= n else prompt[start:] + output[: end - n]


class InputBuilder:
    """Builds `StepInputs`. Holds one table row for each request it has seen; `forget` drops finished ones."""

    def __init__(self, block_size: int, num_groups: int, device: torch.device) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.device = device
        self.rows: dict[str, TableRow] = {}

    def forget(self, request_id: str) -> None:
        self.rows.pop(request_id, None)

    def build(self, step: Step) -> StepInputs:
        sequences = step.sequences
        query_lens = [s.num_new_tokens for s in sequences]
        seq_lens = [s.start + s.num_new_tokens for s in sequences]
        ids: list[int] = []
        for s in sequences:
            ids.extend(tokens_of(s.request, s.start, s.num_new_tokens))
        total = len(ids)
        query_start = np.zeros(len(sequences) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        starts = np.array([s.start for s in sequences], dtype=np.int64)
        owner = np.repeat(np.arange(len(sequences)), query_lens)
        positions = np.arange(total, dtype=np.int64) - query_start[:-1][owner] + starts[owner]
        rows = [self._row(s) for s in sequences]
        groups = [self._group(g, rows, owner, positions) for g in range(self.num_groups)]
        sampling = [i for i, s in enumerate(sequences) if s.samples]
        sample_rows = query_start[1:][sampling] - 1 if sampling else np.zeros(0, dtype=np.int32)
        batch = Batch(
            num_tokens=total,
            num_seqs=len(sequences),
            num_decodes=_leading_decodes(query_lens),
            positions=self._put(positions),
            query_start=self._put(query_start),
            seq_lens=self._put(np.array(seq_lens, dtype=np.int32)),
            host_query_lens=query_lens,
            host_seq_lens=seq_lens,
            groups=groups,
            block_size=self.block_size,
        )
        return StepInputs(
            self._put(np.array(ids, dtype=np.int64)),
            batch,
            self._put(sample_rows.astype(np.int64)),
            [sequences[i].request for i in sampling],
        )

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _row(self, s: ScheduledSequence) -> TableRow:
        """The request's row, brought up to date: blocks before the first written one cannot have changed unless the
        request was preempted or has just been admitted."""
        request = s.request
        row = self.rows.get(request.request_id)
        if row is None or row.expected != s.start or row.preemptions != request.num_preemptions:
            row = TableRow([np.zeros(8, dtype=np.int32)] * self.num_groups, [0] * self.num_groups)
            row.preemptions = request.num_preemptions
            self.rows[request.request_id] = row
            first = 0
        else:
            first = s.start // self.block_size
        for g, table in enumerate(request.block_tables):
            n = len(table)
            array = row.tables[g]
            if n > len(array) or first == 0:
                grown = np.zeros(max(8, 1 << (n - 1).bit_length()) if n else 8, dtype=np.int32)
                grown[: row.counts[g]] = array[: row.counts[g]]
                row.tables[g] = array = grown
            array[first:n] = table[first:]
            row.counts[g] = n
        row.expected = s.start + s.num_new_tokens
        return row

    def _group(self, g: int, rows: Sequence[TableRow], owner: np.ndarray, positions: np.ndarray) -> GroupBatch:
        width = max((row.counts[g] for row in rows), default=0)
        tables = np.zeros((len(rows), max(width, 1)), dtype=np.int32)
        for i, row in enumerate(rows):
            n = row.counts[g]
            tables[i, :n] = row.tables[g][:n]
        size = self.block_size
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        return GroupBatch(self._put(tables), self._put(slots))


def _leading_decodes(query_lens: Sequence[int]) -> int:
    for i, n in enumerate(query_lens):
        if n != 1:
            return i
    return len(query_lens)
