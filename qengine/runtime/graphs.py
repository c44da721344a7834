"""CUDA graphs for decode steps: one captured forward pass a batch size, replayed on fixed buffers.

A small decode step is hundreds of kernels of a few microseconds each, and launching them one by one from Python takes
longer than running them. A graph holds the launches; addresses in it never change, so the inputs are copied into
buffers first: all but the block tables, which have the width that a step needs, in one piece, as the input builder has
laid them out. Steps with a prefill in them, or larger than the largest size, run eagerly. Logits are made after a
replay: one product hides behind the pass that runs before it, and buffers for the logits of the largest step would take
memory that tokens could have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from qengine.layers.batch import Batch, GroupBatch
from qengine.models.model import Model
from qengine.runtime.capture import captured, reason
from qengine.runtime.inputs import WIDTH_STEP, StepInputs, fixed_parts
from qengine.runtime.staging import offsets, view_of
from qengine.runtime.weight_stream import WeightStream

LARGEST = 256
GRAPH_BYTES = 4 << 20
"""What the driver keeps for one captured forward pass of some hundred kernels, about."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending; a step is padded to the next one."""
    most = min(max_num_seqs, LARGEST)
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, LARGEST + 1, 16)]
    return sorted({n for n in ladder if n < most} | {most})


def graph_bytes(max_num_seqs: int, hidden: int, itemsize: int, table_entries: int) -> int:
    """Bytes of the fixed buffers and of what the driver keeps. `table_entries`: blocks of a request, all groups."""
    sizes = graph_sizes(max_num_seqs)
    rows = sizes[-1]
    return rows * (itemsize * hidden + 4 * table_entries) + GRAPH_BYTES * len(sizes)


class DecodeGraphs:
    """Captured decode steps. `run` returns None for a step that must run eagerly.

    Rows that only pad a step have no cached tokens and a negative slot: they read and write nothing.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sequence[int],
        num_groups: int,
        block_size: int,
        max_blocks: int,
        device: torch.device,
        weights: WeightStream | None = None,
    ) -> None:
        """`weights` copies layers from host memory; its copies are captured with what they are for."""
        self.model, self.weights = model, weights
        self.sizes = list(sizes)
        self.block_size = block_size
        self.max_len = max_blocks * block_size
        self.rows = most = self.sizes[-1]
        """Sequences that the buffers hold: what the input builder pads a step to."""
        width = -(-max_blocks // WIDTH_STEP) * WIDTH_STEP

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        parts = fixed_parts(most, num_groups)
        at, size = offsets(parts)
        self.fixed = buffer(size, dtype=torch.uint8)
        views = {part.name: view_of(self.fixed, a, part) for part, a in zip(parts, at, strict=True)}
        self.token_ids, self.positions, self.seq_lens = views["token_ids"], views["positions"], views["seq_lens"]
        self.slots = [views[f"slots{g}"].fill_(-1) for g in range(num_groups)]
        self.query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.tables = [buffer(most, width) for _ in range(num_groups)]
        self.hidden = buffer(most, model.hidden_size, dtype=model.ctx.dtype)
        self.pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> str:
        """Capture all sizes, the largest first so that the smaller ones reuse its memory. Returns a report line."""
        start = time.perf_counter()
        for size in reversed(self.sizes):
            self._captured[size] = captured(partial(self.forward, size), self.pool)
        torch.cuda.synchronize()
        return (
            f"CUDA graphs: decode steps of {self.sizes[0]} to {self.sizes[-1]} sequences, {len(self.sizes)} sizes, "
            f"{time.perf_counter() - start:.1f} seconds"
        )

    def forward(self, size: int) -> None:
        """The step that is captured, run now: from the buffers, into `hidden`."""
        batch = Batch(
            num_tokens=size,
            num_seqs=size,
            num_decodes=size,
            positions=self.positions[:size],
            query_start=self.query_start[: size + 1],
            seq_lens=self.seq_lens[:size],
            host_query_lens=[1] * size,
            host_seq_lens=[self.max_len] * size,
            groups=[GroupBatch(t[:size], s[:size]) for t, s in zip(self.tables, self.slots, strict=True)],
            block_size=self.block_size,
        )
        if self.weights is not None:
            self.weights.begin(size)
        self.hidden[:size].copy_(self.model.forward(self.token_ids[:size], batch))
        if self.weights is not None:
            self.weights.finish()

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Hidden states [n, H] of a step of n decodes, overwritten by the next one; None for a step that must run
        eagerly."""
        size, n = self.fill(inputs), inputs.batch.num_seqs
        if size is None:
            return None
        self.replay(size)
        return self.hidden[:n]

    def fill(self, inputs: StepInputs) -> int | None:
        """Put a step into the buffers; the size to run, None for a step that must run eagerly."""
        if inputs.fixed is None:
            return None
        batch = inputs.batch
        n = batch.num_seqs
        self.fixed.copy_(inputs.fixed)
        for table, group in zip(self.tables, batch.groups, strict=True):
            width = min(table.shape[1], group.block_tables.shape[1])
            table[:n, :width].copy_(group.block_tables[:, :width])
        return next(s for s in self.sizes if s >= n)

    def replay(self, size: int) -> None:
        self._captured[size].replay()


def capture_decodes(
    model: Model,
    max_num_seqs: int,
    max_model_len: int,
    num_groups: int,
    block_size: int,
    device: torch.device,
    weights: WeightStream | None = None,
) -> tuple[DecodeGraphs | None, str]:
    """Graphs and a report line; no graphs, and the reason, for a model whose forward pass cannot be captured."""
    blocks = -(-max_model_len // block_size)
    with torch.inference_mode():
        graphs = DecodeGraphs(model, graph_sizes(max_num_seqs), num_groups, block_size, blocks, device, weights)
        try:
            return graphs, graphs.capture()
        except RuntimeError as e:
            if weights is not None:
                weights.restart()
            return None, f"CUDA graphs: not used, the forward pass cannot be captured ({reason(e)})"
