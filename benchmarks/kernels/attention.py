"""Paged attention on the shape of an 8B Llama: decode and prefill with a 16-bit and an fp8 cache.

    python benchmarks/kernels/attention.py [--json FILE]

How it is measured: `qengine.bench.attention_kernels` (`qengine bench kernels` takes other shapes and KV dtypes). The
peer is FlashAttention 3 as vLLM 0.26 calls it, read on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from timing import arguments, header, write

from qengine.bench.attention_kernels import BLOCK, Pool, measure
from qengine.plugin import AttentionSpec
from qengine.plugin.discovery import load_plugin

SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
KINDS = {"bf16": "auto", "fp8": "fp8"}
DECODES = ((1, 256), (1, 8192), (16, 8192), (64, 1024), (64, 8192), (80, 2000), (256, 640), (256, 8192))
PREFILLS = ((16, 512, 512), (1, 8192, 8192), (4, 1024, 4096))
"""Sequences, new tokens, cached tokens."""
PEER = {
    ("bf16", 1, 8192): 17.8, ("fp8", 1, 8192): 17.5, ("bf16", 16, 8192): 132, ("fp8", 16, 8192): 102,
    ("bf16", 64, 1024): 78.0, ("fp8", 64, 1024): 65.5, ("bf16", 256, 8192): 1965, ("fp8", 256, 8192): 1522,
}  # fmt: skip
GOAL = {("fp8", 64, 8192): 290.0}


def row_of(kind: str, pool: Pool, sequences: int, new: int, cached: int) -> dict[str, Any]:
    key = (kind, sequences, cached)
    peer, goal = (PEER.get(key), GOAL.get(key)) if new == 1 else (None, None)
    return measure(pool, sequences, new, cached) | {"kv": kind, "peer": peer, "goal": goal}


def main() -> None:
    args = arguments(__doc__)
    rows = []
    for kind, plugin in KINDS.items():
        pool = Pool(load_plugin("kv", plugin), SPEC, 256 * 8192 // BLOCK)
        rows += [row_of(kind, pool, sequences, 1, cached) for sequences, cached in DECODES]
        rows += [row_of(kind, pool, *shape) for shape in PREFILLS]
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
