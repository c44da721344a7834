"""A toy paged cache and a step over it, for tests of kernels and caches. Blocks are dealt out in random order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.layers.batch import Batch, GroupBatch
from qengine.plugin import AttentionSpec, KVLayout


@dataclass
class PagedCase:
    """K and V of every sequence as plain float32, and the step that asks about them.

    keys, values  float32 [num_blocks, block_size, Hkv, D], what the cache means; slots outside every sequence are NaN
    slots         int64 [cached tokens of all sequences], in sequence order
    """

    batch: Batch
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    q: torch.Tensor

    @property
    def tables(self) -> torch.Tensor:
        return self.batch.groups[0].block_tables

    def cached(self, which: torch.Tensor) -> torch.Tensor:
        """keys or values of the cached tokens, [cached tokens, Hkv, D], as they would be written."""
        return which.flatten(0, 1)[self.slots]


def paged_case(
    spec: AttentionSpec,
    query_lens: list[int],
    seq_lens: list[int],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
    spread: float = 1.0,
) -> PagedCase:
    """Random q, K, V (rounded to `dtype`) for sequences of the given lengths; one-token queries must come first."""
    blocks = [-(-n // block_size) for n in seq_lens]
    order = (1 + torch.randperm(sum(blocks) + 2)).tolist()
    tables = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    slots = []
    for i, (n, cached) in enumerate(zip(blocks, seq_lens, strict=True)):
        tables[i, :n] = torch.tensor([order.pop() for _ in range(n)])
        position = torch.arange(cached)
        slots.append(tables[i].long()[position // block_size] * block_size + position % block_size)
    all_slots = torch.cat(slots)
    shape = (sum(blocks) + 3, block_size, spec.num_kv_heads, spec.head_dim)
    pools = []
    for _ in range(2):
        pool = torch.full(shape, float("nan"))
        pool.flatten(0, 1)[all_slots] = (torch.randn(len(all_slots), *shape[2:]) * spread).to(dtype).float()
        pools.append(pool.to(device))
    start = torch.tensor([0, *query_lens]).cumsum(0)
    new_slots = torch.cat([s[len(s) - n :] for s, n in zip(slots, query_lens, strict=True)])
    positions = [torch.arange(c - n, c) for n, c in zip(query_lens, seq_lens, strict=True)]
    batch = Batch(
        num_tokens=sum(query_lens),
        num_seqs=len(query_lens),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
        positions=torch.cat(positions).to(device),
        query_start=start.to(torch.int32).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
        groups=[GroupBatch(tables.to(device), new_slots.to(device))],
        block_size=block_size,
    )
    q = torch.randn(sum(query_lens), spec.num_heads, spec.head_dim).to(dtype).to(device)
    return PagedCase(batch, pools[0], pools[1], all_slots.to(device), q)


def empty_storage(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes] full of 0xFF, which is NaN in every float format; null block 0 is zero."""
    storage = torch.full((num_blocks, layout.block_bytes), 255, dtype=torch.uint8, device=device)
    storage[0] = 0
    return storage
