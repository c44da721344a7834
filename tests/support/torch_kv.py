"""A paged KV cache in plain float32 torch, and the steps that drive a model over it.

For tests that compare models with transformers: no kernels, no plugin, one block table for all layers. Unwritten
slots hold NaN, so reading one shows. Block ids are shuffled, so that paging matters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from qengine.layers.attention import KVLayer
from qengine.layers.batch import Batch, GroupBatch
from qengine.models.model import Model
from qengine.plugin import AttentionSpec

BLOCK_SIZE = 4


class TorchKVLayer:
    """The KVLayer protocol, one sequence at a time. `spec` can be swapped for a wrong one in a control."""

    kernel = "plain torch"

    def __init__(self, spec: AttentionSpec, num_blocks: int) -> None:
        self.spec = spec
        shape = (num_blocks * BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.k = torch.full(shape, torch.nan)
        self.v = torch.full(shape, torch.nan)

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: Batch, group: int) -> None:
        slots = batch.groups[group].slot_mapping
        self.k[slots] = k.float()
        self.v[slots] = v.float()

    def attend(self, q: torch.Tensor, batch: Batch, group: int) -> torch.Tensor:
        out, first = torch.empty_like(q), 0
        for i, (n, length) in enumerate(zip(batch.host_query_lens, batch.host_seq_lens, strict=True)):
            blocks = batch.groups[group].block_tables[i].long()
            slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
            out[first : first + n] = self._attend_one(q[first : first + n].float(), slots).to(q.dtype)
            first += n
        return out

    def _attend_one(self, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """q [n, heads, head_dim]: the last n tokens of a sequence whose K/V lie at `slots`."""
        spec, n, length = self.spec, q.shape[0], len(slots)
        k = self.k[slots].repeat_interleave(spec.group, dim=1)
        v = self.v[slots].repeat_interleave(spec.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        distance = torch.arange(length - n, length)[:, None] - torch.arange(length)
        visible = distance >= 0
        if spec.sliding_window is not None:
            visible &= distance < spec.sliding_window
        scores = scores.masked_fill(~visible, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class PagedRun:
    """Drives a model step by step over several sequences and collects the logits of every token."""

    def __init__(
        self,
        model: Model,
        sequences: Sequence[Sequence[int]],
        bind: Callable[[AttentionSpec, int], KVLayer] = TorchKVLayer,
    ) -> None:
        """`bind(spec, num_blocks)` makes the cache of one layer, on the model's device."""
        self.model = model
        self.device = model.ctx.device
        self.sequences = [list(s) for s in sequences]
        needed = [-(-len(s) // BLOCK_SIZE) for s in self.sequences]
        blocks = list(range(1, sum(needed) + 1))
        random.Random(0).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in needed]
        self.done = [0] * len(self.sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        for layer in model.attention:
            layer.cache = bind(layer.spec, sum(needed) + 1)

    def step(self, counts: Sequence[int]) -> None:
        """Compute the next counts[i] tokens of sequence i (0: not in this step); single tokens go first."""
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i] > 1)
        batch, ids = self.batch([(i, counts[i]) for i in order])
        with torch.inference_mode():
            rows = self.model.logits(self.model.forward(ids, batch)).cpu()
        for i, part in zip(order, rows.split([counts[i] for i in order]), strict=True):
            self.logits[i].append(part)
            self.done[i] += counts[i]

    def batch(self, parts: Sequence[tuple[int, int]]) -> tuple[Batch, torch.Tensor]:
        width = max(len(t) for t in self.tables)
        positions = torch.cat([torch.arange(self.done[i], self.done[i] + n) for i, n in parts])
        owners = torch.tensor([i for i, n in parts for _ in range(n)])
        tables = torch.tensor([t + [0] * (width - len(t)) for t in self.tables], dtype=torch.int32)
        slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        lens = [n for _, n in parts]
        ends = [self.done[i] + n for i, n in parts]
        batch = Batch(
            num_tokens=sum(lens),
            num_seqs=len(parts),
            num_decodes=sum(n == 1 for n in lens),
            positions=positions.to(self.device),
            query_start=torch.tensor([0, *lens]).cumsum(0).int().to(self.device),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=self.device),
            host_query_lens=lens,
            host_seq_lens=ends,
            groups=[GroupBatch(tables[[i for i, _ in parts]].to(self.device), slots.to(self.device))],
            block_size=BLOCK_SIZE,
        )
        ids = torch.tensor([t for i, n in parts for t in self.sequences[i][self.done[i] : self.done[i] + n]])
        return batch, ids.to(self.device)

    def run(self, chunk: int | None = None) -> list[torch.Tensor]:
        """All tokens in steps of at most `chunk` a sequence -> float32 [length, vocab] of each sequence."""
        while any(n < len(s) for n, s in zip(self.done, self.sequences, strict=True)):
            left = [len(s) - n for n, s in zip(self.done, self.sequences, strict=True)]
            self.step(left if chunk is None else [min(chunk, n) for n in left])
        return [torch.cat(parts) for parts in self.logits]
