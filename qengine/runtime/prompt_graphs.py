"""CUDA graphs for short steps with prompts in them: what a first token waits for, where launching takes longer than
computing.

A captured step has a fixed number of tokens and of sequences. Tokens beyond a step's own have a negative slot and
belong to no sequence; sequences beyond its own have none. The attention kernels read lengths from the device, so any
step of up to so many tokens and sequences can be replayed, decodes in it being prompts of one token. Those walk their
cached tokens in one program instead of splitting them, which bounds the length. Larger steps run eagerly: their kernels
take longer than being launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from qengine.layers.attention import DeviceLengths
from qengine.layers.batch import Batch, GroupBatch
from qengine.models.model import Model
from qengine.runtime.capture import captured, reason
from qengine.runtime.graphs import GRAPH_BYTES, DecodeGraphs
from qengine.runtime.inputs import StepInputs
from qengine.runtime.weight_stream import WeightStream

LADDER = (32, 64, 128, 192, 256, 384, 512)
"""Tokens of captured steps."""
SEQUENCES = 8
LONGEST = 8192
"""Cached tokens of a sequence in a replayed step."""


def prompt_sizes(batched_tokens: int) -> list[int]:
    """Numbers of tokens to capture, ascending."""
    return [n for n in LADDER if n <= batched_tokens]


def prompt_graph_bytes(batched_tokens: int, hidden: int, itemsize: int) -> int:
    """Bytes of the fixed buffers and of what the driver keeps; the steps' tensors come on top."""
    sizes = prompt_sizes(batched_tokens)
    return (sizes[-1] * hidden * itemsize + GRAPH_BYTES * len(sizes)) if sizes else 0


class PromptGraphs:
    """Captured steps of few tokens and sequences. Block tables are those of the decode graphs, whose memory the
    captured steps share: graphs run one after another."""

    def __init__(self, model: Model, sizes: Sequence[int], decodes: DecodeGraphs, weights: WeightStream | None) -> None:
        self.model, self.weights, self.decodes = model, weights, decodes
        self.sizes = list(sizes)
        device, most = decodes.hidden.device, self.sizes[-1]
        self.token_ids, self.positions = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        self.slots = [torch.full((most,), -1, dtype=torch.int64, device=device) for _ in decodes.tables]
        self.rows = min(SEQUENCES, decodes.rows)
        self.query_start = torch.zeros(self.rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(self.rows, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(most, model.hidden_size, dtype=model.ctx.dtype, device=device)
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> str:
        """Capture all sizes, the largest first. Returns a report line."""
        start = time.perf_counter()
        for size in reversed(self.sizes):
            self._captured[size] = captured(partial(self.forward, size), self.decodes.pool)
        torch.cuda.synchronize()
        return (
            f"CUDA graphs: prompts of up to {self.sizes[-1]} tokens in up to {self.rows} sequences, "
            f"{len(self.sizes)} sizes, {time.perf_counter() - start:.1f} seconds"
        )

    def forward(self, size: int) -> None:
        """The step that is captured, run now: from the buffers, into `hidden`."""
        rows, tables = self.rows, self.decodes.tables
        batch = Batch(
            num_tokens=size,
            num_seqs=rows,
            num_decodes=0,
            positions=self.positions[:size],
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            host_query_lens=[size] * rows,
            host_seq_lens=[self.decodes.max_len] * rows,
            groups=[GroupBatch(t[:rows], s[:size]) for t, s in zip(tables, self.slots, strict=True)],
            block_size=self.decodes.block_size,
        )
        if self.weights is not None:
            self.weights.begin(size)
        self.hidden[:size].copy_(self.model.forward(self.token_ids[:size], batch))
        if self.weights is not None:
            self.weights.finish()

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Hidden states [n, H] of a step of n tokens, overwritten by the next one; None for a step that must run
        eagerly."""
        size = self.fill(inputs)
        if size is None:
            return None
        self.replay(size)
        return self.hidden[: inputs.batch.num_tokens]

    def fill(self, inputs: StepInputs) -> int | None:
        """Put a step into the buffers; the size to run, None for a step that must run eagerly."""
        batch = inputs.batch
        n, count = batch.num_tokens, batch.num_seqs
        if n > self.sizes[-1] or count > self.rows or batch.max_seq_len > LONGEST:
            return None
        self.token_ids[:n].copy_(inputs.token_ids)
        self.positions[:n].copy_(batch.positions)
        self.query_start[: count + 1].copy_(batch.query_start)
        self.query_start[count + 1 :].fill_(n)
        self.seq_lens[:count].copy_(batch.seq_lens)
        self.seq_lens[count:].zero_()
        for slots, table, group in zip(self.slots, self.decodes.tables, batch.groups, strict=True):
            slots[:n].copy_(group.slot_mapping)
            slots[n:].fill_(-1)
            width = min(table.shape[1], group.block_tables.shape[1])
            table[:count, :width].copy_(group.block_tables[:, :width])
        return next(s for s in self.sizes if s >= n)

    def replay(self, size: int) -> None:
        self._captured[size].replay()


def capture_prompts(
    model: Model, batched_tokens: int, decodes: DecodeGraphs, weights: WeightStream | None
) -> tuple[PromptGraphs | None, str]:
    """Graphs and a report line; no graphs, and the reason, for caches whose kernels take lengths from the host."""
    sizes = prompt_sizes(batched_tokens)
    caches = [layer.cache for layer in model.attention]
    if not sizes or not all(isinstance(c, DeviceLengths) and c.prompts_by_device_lengths for c in caches):
        why = "attention takes prompts' lengths from the host" if sizes else f"steps have {batched_tokens} tokens"
        return None, f"CUDA graphs: none for prompts ({why})"
    with torch.inference_mode():
        graphs = PromptGraphs(model, sizes, decodes, weights)
        try:
            return graphs, graphs.capture()
        except RuntimeError as e:
            if weights is not None:
                weights.restart()
            return None, f"CUDA graphs: none for prompts, the forward pass cannot be captured ({reason(e)})"
