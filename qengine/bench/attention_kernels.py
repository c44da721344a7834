"""Paged attention of one shape on this GPU, with any KV dtype that the shared templates serve.

Microseconds a call from CUDA graph replay, caches rotated through the L2 cache, blocks in random order; results are
checked against float32 in the same run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from qengine.errors import QEngineError
from qengine.plugin import AttentionSpec, KVDtype, KVLayout
from qengine_kernels.launch import Chip
from qengine_kernels.paged_attention import TritonPagedKV, paged_attention_reference
from qengine_kernels.timing import COLD_BYTES, error, graph_us

BLOCK = 16
LIMIT = 0.01
"""Relative error above which a result is wrong."""
CHECKED = 1024 * 4096
"""Products of new and cached tokens up to which a result is compared: the reference holds all of them."""


class Pool:
    """A cache full of random K and V, and batches that read different parts of it."""

    def __init__(self, kind: type[KVDtype], spec: AttentionSpec, blocks: int) -> None:
        sides = [kind(spec, side, torch.bfloat16) for side in ("k", "v")]  # type: ignore[arg-type]
        layout = KVLayout.of(BLOCK, sides[0].layout(BLOCK), sides[1].layout(BLOCK))
        storage = torch.zeros(blocks + 1, layout.block_bytes, dtype=torch.uint8, device="cuda")
        k_scale, v_scale = (torch.rand(spec.num_kv_heads, device="cuda") + 0.5 for _ in sides)
        k_functions, v_functions = (side.functions() for side in sides)
        native = Chip.of(storage.device).sm >= 89
        self.spec, self.sides, self.layout, self.storage = spec, sides, layout, storage
        self.order = torch.randperm(blocks, device="cuda") + 1
        self.scales = k_scale, v_scale
        self.cache = TritonPagedKV(
            storage, layout, spec, k_scale, v_scale, k_functions, v_functions, native, torch.bfloat16
        )
        self.fill(blocks)

    def fill(self, blocks: int) -> None:
        """Write random vectors to every slot, by the kernel that serves."""
        spec, size = self.spec, 1024 * BLOCK
        for first in range(BLOCK, (blocks + 1) * BLOCK, size):
            slots = torch.arange(first, min(first + size, (blocks + 1) * BLOCK), device="cuda")
            shape = (len(slots), spec.num_kv_heads, spec.head_dim)
            k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
            self.cache.write(k, v, SimpleNamespace(groups=[SimpleNamespace(slot_mapping=slots)]), 0)

    def batches(self, sequences: int, new: int, cached: int) -> list[Any]:
        blocks = sequences * -(-cached // BLOCK)
        nbytes = blocks * self.layout.block_bytes
        count = max(1, min(12, len(self.order) // blocks, -(-COLD_BYTES // nbytes) + 1))
        start = torch.arange(0, sequences * new + 1, new, dtype=torch.int32, device="cuda")
        lens = torch.full((sequences,), cached, dtype=torch.int32, device="cuda")
        return [
            SimpleNamespace(
                num_decodes=sequences if new == 1 else 0,
                num_seqs=sequences,
                query_start=start,
                seq_lens=lens,
                host_query_lens=[new] * sequences,
                groups=[SimpleNamespace(block_tables=part.view(sequences, -1).to(torch.int32).contiguous())],
            )
            for part in self.order[: count * blocks].split(blocks)
        ]

    def reference(self, q: torch.Tensor, batch: Any, new: int, cached: int) -> torch.Tensor:
        """The last sequence's result in float32."""
        table = batch.groups[0].block_tables[-1].long()
        spec, values = self.spec, list[torch.Tensor]()
        for side, where, offset, scale in zip(
            self.sides, (self.layout.k, self.layout.v), (self.layout.k_offset, self.layout.v_offset), self.scales,
            strict=True,
        ):  # fmt: skip
            flat = self.storage[table].view(where.dtype)[:, offset // where.dtype.itemsize :]
            shape = (len(table), BLOCK, spec.num_kv_heads, where.row)
            strides = (flat.stride(0), where.token_stride, where.head_stride, 1)
            rows = flat.as_strided(shape, strides, flat.storage_offset()).contiguous()
            values.append(side.decode(rows, torch.float32) * scale[:, None])
        own = torch.arange(len(table), device="cuda")[None]
        return paged_attention_reference(q, values[0], values[1], own, [new], [cached], spec.scale)


def measure(pool: Pool, sequences: int, new: int, cached: int) -> dict[str, Any]:
    """Sequences of `cached` tokens of which `new` are computed: microseconds, and GB/s of a decode's cache or TFLOP/s
    of a prompt. Raises QEngineError for a wrong result."""
    spec = pool.spec
    q = torch.randn(sequences * new, spec.num_heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
    batches = pool.batches(sequences, new, cached)
    if new * cached <= CHECKED:
        out = pool.cache.attend(q, batches[0], 0)
        wrong = error(out[-new:], pool.reference(q[-new:], batches[0], new, cached))
        if not wrong < LIMIT:
            raise QEngineError(f"{sequences} x {new} of {cached}: relative error {wrong:.3g} above {LIMIT}")
    us = graph_us([lambda b=b: pool.cache.attend(q, b, 0) for b in batches])  # type: ignore[misc]
    row = {"kv": pool.sides[0].name, "sequences": sequences, "new": new, "cached": cached, "us": us}
    if new == 1:
        return row | {"GB/s": sequences * cached * pool.layout.block_bytes / BLOCK / us / 1e3}
    pairs = sequences * (new * cached - new * (new - 1) / 2)
    return row | {"TFLOP/s": 4 * pairs * spec.num_heads * spec.head_dim / us / 1e6}
