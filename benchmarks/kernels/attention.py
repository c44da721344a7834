"""Paged attention on the shape of an 8B Llama: decode and prefill with a 16-bit and an fp8 cache.

    python benchmarks/kernels/attention.py [--json FILE]

Microseconds a call from CUDA graph replay, caches rotated through the L2 cache, blocks in random order; every result is
checked against float32 in the same run. The peer is FlashAttention 3 as vLLM 0.26 calls it, read on an H200.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from timing import arguments, header, write

from qengine.plugin import AttentionSpec, KVDtype, KVLayout
from qengine_dense.kv import AutoKV
from qengine_kernels.paged_attention import TritonPagedKV, paged_attention_reference
from qengine_kernels.timing import COLD_BYTES, error, graph_us
from qengine_kv_fp8.backend import Fp8E4M3KV

SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
BLOCK = 16
KINDS: dict[str, type[KVDtype]] = {"bf16": AutoKV, "fp8": Fp8E4M3KV}
DECODES = ((1, 256), (1, 8192), (16, 8192), (64, 1024), (64, 8192), (80, 2000), (256, 640), (256, 8192))
PREFILLS = ((16, 512, 512), (1, 8192, 8192), (4, 1024, 4096))
"""Sequences, new tokens, cached tokens."""
PEER = {
    ("bf16", 1, 8192): 17.8, ("fp8", 1, 8192): 17.5, ("bf16", 16, 8192): 132, ("fp8", 16, 8192): 102,
    ("bf16", 64, 1024): 78.0, ("fp8", 64, 1024): 65.5, ("bf16", 256, 8192): 1965, ("fp8", 256, 8192): 1522,
}  # fmt: skip
GOAL = {("fp8", 64, 8192): 290.0}


class Pool:
    """A cache full of random K and V, and batches that read different parts of it."""

    def __init__(self, kind: str, blocks: int) -> None:
        sides = [KINDS[kind](SPEC, side, torch.bfloat16) for side in ("k", "v")]  # type: ignore[arg-type]
        layout = KVLayout.of(BLOCK, sides[0].layout(BLOCK), sides[1].layout(BLOCK))
        storage = torch.empty(blocks + 1, layout.block_bytes, dtype=torch.uint8, device="cuda")
        self.scales = [torch.rand(SPEC.num_kv_heads, device="cuda") + 0.5 for _ in sides]
        values = 2 * BLOCK * SPEC.num_kv_heads * SPEC.head_dim
        for part in storage.split(8192):
            part.copy_(sides[0].encode(torch.randn(len(part), values, device="cuda").bfloat16()).view(torch.uint8))
        functions = [side.functions() for side in sides]
        self.side, self.storage, self.order = sides[0], storage, torch.randperm(blocks, device="cuda") + 1
        self.cache = TritonPagedKV(storage, layout, SPEC, *self.scales, *functions, True, torch.bfloat16)
        self.nbytes = layout.block_bytes

    def batches(self, sequences: int, new: int, cached: int) -> list[Any]:
        blocks = sequences * -(-cached // BLOCK)
        count = max(1, min(12, len(self.order) // blocks, -(-COLD_BYTES // (blocks * self.nbytes)) + 1))
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
        table = batch.groups[0].block_tables[-1]
        shape = (2, BLOCK, SPEC.num_kv_heads, SPEC.head_dim)
        rows = self.storage[table.long()]
        stored = rows if self.side.layout(BLOCK).dtype is torch.uint8 else rows.view(torch.bfloat16)
        values = self.side.decode(stored, torch.float32).view(-1, *shape)
        k, v = (values[:, i] * self.scales[i][:, None] for i in range(2))
        own = torch.arange(len(table), device="cuda")[None]
        return paged_attention_reference(q, k, v, own, [new], [cached], SPEC.scale)


def measure(kind: str, pool: Pool, sequences: int, new: int, cached: int) -> dict[str, Any]:
    q = torch.randn(sequences * new, SPEC.num_heads, SPEC.head_dim, device="cuda", dtype=torch.bfloat16)
    batches = pool.batches(sequences, new, cached)
    if new * cached <= 1024 * 4096:
        out = pool.cache.attend(q, batches[0], 0)
        wrong = error(out[-new:], pool.reference(q[-new:], batches[0], new, cached))
        if not wrong < 1e-2:
            raise SystemExit(f"{kind} {sequences} x {new} of {cached}: relative error {wrong:.3g}")
    us = graph_us([lambda b=b: pool.cache.attend(q, b, 0) for b in batches])
    row = {"kv": kind, "sequences": sequences, "new": new, "cached": cached, "us": us}
    if new == 1:
        read = sequences * cached * pool.nbytes / BLOCK
        key = (kind, sequences, cached)
        return row | {"GB/s": read / us / 1e3, "peer": PEER.get(key), "goal": GOAL.get(key)}
    pairs = sequences * (new * cached - new * (new - 1) / 2)
    return row | {"TFLOP/s": 4 * pairs * SPEC.num_heads * SPEC.head_dim / us / 1e6}


def main() -> None:
    args = arguments(__doc__)
    rows = []
    for kind in KINDS:
        pool = Pool(kind, 256 * 8192 // BLOCK)
        rows += [measure(kind, pool, sequences, 1, cached) for sequences, cached in DECODES]
        rows += [measure(kind, pool, *shape) for shape in PREFILLS]
        del pool
        torch.cuda.empty_cache()
    print(header())
    print("| KV | decode: batch x cached | us | KV GB/s | peer us | goal us |\n|---|---|---|---|---|---|")
    for row in (r for r in rows if r["new"] == 1):
        peer, goal = ("" if row[name] is None else f"{row[name]:g}" for name in ("peer", "goal"))
        shape = f"{row['sequences']} x {row['cached']}"
        print(f"| {row['kv']} | {shape} | {row['us']:.1f} | {row['GB/s']:,.0f} | {peer} | {goal} |")
    print("\n| KV | prefill: batch x new of cached | us | TFLOP/s |\n|---|---|---|---|")
    for row in (r for r in rows if r["new"] > 1):
        shape = f"{row['sequences']} x {row['new']} of {row['cached']}"
        print(f"| {row['kv']} | {shape} | {row['us']:,.0f} | {row['TFLOP/s']:.0f} |")
    write(args.json, rows)


if __name__ == "__main__":
    main()
