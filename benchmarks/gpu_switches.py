"""What single features give: the same load with one of them on and off, in one run.

    python benchmarks/gpu_switches.py [--weights awq] [--json FILE] [--rows on,eager,...]

A Llama-3.1-8B shape with random weights made on the device, fp8 KV cache. Loads, token ids random and ends ignored:

- one: a prompt of 128, 128 tokens out; 64: as many of them at once (decode tokens/s, the first token does not count);
- shared: 256 prompts of the same 512 tokens and 64 of their own, 16 out (output tokens/s);
- pool: 128 prompts of 512, 256 out, in a KV cache that holds half of them in 16 bits (output tokens/s).

Each row is an engine in a process of its own, measured on the loads that its switch is about.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_llama8b import SHAPES, WEIGHTS, write_config

from qengine.bench.rows import add_row_arguments, chosen, print_rows

DECODES, SHARED, POOL = ("one", "64"), ("shared",), ("pool",)
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "on": ({}, (*DECODES, *SHARED)),
    "eager": ({"enforce_eager": True}, DECODES),
    "synchronous": ({"async_scheduling": False}, DECODES),
    "no prefix cache": ({"enable_prefix_caching": False}, SHARED),
    "pool fp8": ({}, POOL),
    "pool 16-bit": ({"kv_cache_dtype": "auto"}, POOL),
}
"""Engine options beside the usual ones, and loads."""
SWITCHES = (
    ("CUDA graphs", "on", "eager"),
    ("asynchronous scheduling", "on", "synchronous"),
    ("prefix cache", "on", "no prefix cache"),
    ("fp8 KV in a pool for half of the load", "pool fp8", "pool 16-bit"),
)
# prompt, shared beginning, tokens out, prompts; by shape and load
SIZES: dict[str, dict[str, tuple[int, int, int, int]]] = {
    "8b": {"one": (128, 0, 128, 1), "64": (128, 0, 128, 64), "shared": (64, 512, 16, 256), "pool": (512, 0, 256, 128)},
    "tiny": {"one": (16, 0, 8, 1), "64": (16, 0, 8, 4), "shared": (16, 64, 4, 8), "pool": (32, 0, 16, 8)},
}


def engine_options(args: argparse.Namespace, row: str) -> dict[str, Any]:
    tiny = args.shape == "tiny"
    options: dict[str, Any] = {
        "load_format": "dummy", "kv_cache_dtype": "fp8", "device": args.device, "max_model_len": 128 if tiny else 8192,
        "max_num_seqs": 8 if tiny else 256, "max_num_batched_tokens": 64 if tiny else 8192,
    }  # fmt: skip
    if "pool" in ROWS[row][1]:
        given, _, new, count = SIZES[args.shape]["pool"]
        shape = SHAPES[args.shape]
        token = 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2 * shape["num_hidden_layers"]
        options["kv_cache_memory_bytes"] = (given + new) * count // 2 * token
    elif tiny:
        options["kv_cache_memory_bytes"] = 8 << 20
    return options | ROWS[row][0]


def measure(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """All figures of one row, in this process."""
    from qengine.bench.figures import Timing
    from qengine.bench.offline import TimedEngine
    from qengine.bench.prompts import Ask, asks, token_ids
    from qengine.config import EngineConfig

    options = engine_options(args, row)
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), args.shape, args.weights)
        config = EngineConfig(model=name, **options)
        timed = TimedEngine(config, False, lambda line: print(line, file=sys.stderr, flush=True))
    vocab = timed.engine.facts.vocab_size

    def run(made: Sequence[Ask], shared: int) -> list[Timing]:
        return timed.run([(token_ids(ask, shared, vocab), ask.output_len) for ask in made])

    found: dict[str, Any] = {"row": row, "options": options, "kv_tokens": timed.engine.facts.kv_tokens}
    for i, load in enumerate(ROWS[row][1]):
        given, shared, new, count = SIZES[args.shape][load]
        run(asks("random", min(count, 4), given, new, 0.0, seed=100 + i), 0)  # not counted
        timings = run(asks("random", count, given, new, 0.0, seed=i), shared)
        whole = max(t.e2el for t in timings)
        found[load] = count * new / whole
        if load in DECODES:
            found[load] = count * (new - 1) / (whole - min(t.ttft for t in timings))
    stats = timed.engine.stats()
    return found | {"preemptions": stats.num_preemptions, "kernels_compiled": stats.kernels_compiled}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each switch and load that was measured both ways."""
    by_row = {r["row"]: r for r in results}
    lines = ["| switch | load | on, tok/s | off, tok/s | gain |", "|---|---|---|---|---|"]
    for what, on, off in SWITCHES:
        a, b = by_row.get(on, {}), by_row.get(off, {})
        if error := a.get("error") or b.get("error"):
            lines.append(f"| {what} | | {error} | | |")
        lines += [
            f"| {what} | {load} | {a[load]:,.1f} | {b[load]:,.1f} | {a[load] / b[load]:.2f} |"
            for load in SIZES["8b"] if load in a and load in b
        ]  # fmt: skip
    return lines


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_row_arguments(parser, ROWS)
    parser.add_argument("--weights", default="awq", choices=WEIGHTS)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    args.rows = chosen(parser, "row", args.rows, ROWS)
    return args


def main(argv: Sequence[str]) -> None:
    print_rows(__file__, argv, parse(argv), measure, table)


if __name__ == "__main__":
    main(sys.argv[1:])
