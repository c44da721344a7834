"""`qengine bench kernels`: microseconds of linears and of attention on this GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qengine.bench.options import KernelOptions, heads_of, numbers_of, pairs_of
from qengine.errors import CapabilityError
from qengine.plugin import AttentionSpec
from qengine.plugin.discovery import load_plugin
from qengine_kernels.timing import conditions

COLUMNS = ("cuBLAS", "W4", "FP8")


def measure(options: KernelOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """{"device", "torch", "triton", "linears": rows, "attention": rows}. Raises CapabilityError without a GPU."""
    if not torch.cuda.is_available():
        raise CapabilityError("kernels are measured on a GPU", have="no CUDA device", need="a GPU of sm_80 or newer")
    from qengine.bench import attention_kernels, linear_kernels

    found: dict[str, Any] = {**conditions(), "linears": [], "attention": []}
    for n, k in pairs_of(options.shapes):
        say(f"linear {n} x {k}")
        found["linears"] += linear_kernels.measure(n, k, numbers_of("--rows", options.rows), options.group_size)
        torch.cuda.empty_cache()
    decodes = pairs_of(options.decodes, "--decodes")
    heads, kv_heads, dim = heads_of(options.heads)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    for name in options.kv_dtypes.split(",") if decodes else []:
        say(f"attention with {name}")
        most = max(sequences * -(-cached // attention_kernels.BLOCK) for sequences, cached in decodes)
        pool = attention_kernels.Pool(load_plugin("kv", name), spec, most)
        found["attention"] += [attention_kernels.measure(pool, sequences, 1, cached) for sequences, cached in decodes]
        del pool
        torch.cuda.empty_cache()
    return found


def lines(found: dict[str, Any]) -> list[str]:
    out = [f"{found['device']}, torch {found['torch']}, triton {found['triton']}"]
    if found["linears"]:
        out += ["| N x K | M | " + " | ".join(COLUMNS) + " | W4 route | floor W4 |", "|---" * (len(COLUMNS) + 4) + "|"]
        out += [_linear(row) for row in found["linears"]]
    if found["attention"]:
        out += ["", "| KV | decode: batch x cached | us | KV GB/s |", "|---|---|---|---|"]
        out += [
            f"| {r['kv']} | {r['sequences']} x {r['cached']} | {r['us']:.1f} | {r['GB/s']:,.0f} |"
            for r in found["attention"]
        ]
    return out


def _linear(row: dict[str, Any]) -> str:
    cells: Sequence[str] = [f"{row[c]:.1f}" if c in row else "" for c in COLUMNS]
    return (
        f"| {row['n']} x {row['k']} | {row['m']} | " + " | ".join(cells)
        + f" | {row.get('route', '')} | {row['floor']:.1f} |"
    )  # fmt: skip
