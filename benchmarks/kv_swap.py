"""KV swap beside recomputing: a pool for half the load, and prompts that come again after they were evicted.

    python benchmarks/kv_swap.py [--shape 8b] [--weights bf16] [--kv-dtype fp8] [--device cuda] [--json FILE]

One engine with random weights is built; schedulers over a part of its KV cache are then measured in turn, each with its
costs measured as at start:

- Load: prompts that all run at once, in a pool for all of them, in one for half of them with preempted requests
  recomputed, and in the same one with `--swap-space` (policy auto).
- Again: documents with short answers, asked twice in a pool that holds half of them; the second time counts.

Token ids are random, ends are ignored, no text is made. A first small run is not counted. Rows are printed as they
come.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_llama8b import SHAPES, WEIGHTS, write_config

from qengine.bench.prompts import asks, token_ids
from qengine.config import EngineConfig
from qengine.core.pages import KVCacheManager
from qengine.core.scheduler import Scheduler
from qengine.messages import NewRequest
from qengine.runtime.engine import Engine
from qengine.runtime.kv_host import HostBlocks
from qengine.runtime.kv_swap import Measured, measure, start_swapping, take_host_memory
from qengine.sampling_params import SamplingParams

SIZES = {
    # prompts, tokens of each, generated; documents, tokens of each, generated
    "8b": (64, 512, 256, 16, 2048, 8),
    "tiny": (8, 24, 40, 6, 96, 4),
}
Prompts = list[tuple[list[int], int]]


class Bench:
    """One engine whose KV cache is given out again and again, in pools of several sizes."""

    def __init__(self, args: argparse.Namespace) -> None:
        tiny = args.shape == "tiny"
        with tempfile.TemporaryDirectory() as name:
            write_config(Path(name), args.shape, args.weights)
            config = EngineConfig(
                model=name, load_format="dummy", device=args.device, kv_cache_dtype=args.kv_dtype,
                max_model_len=128 if tiny else 4096, max_num_seqs=8 if tiny else 64,
                max_num_batched_tokens=64 if tiny else 2048, kv_cache_memory_bytes=(8 << 20) if tiny else args.pool,
            )  # fmt: skip
            start = time.perf_counter()
            self.first = Engine.from_config(config)
            self.ready_s = time.perf_counter() - start
        self.host: HostBlocks | None = None
        self.measured: Measured | None = None
        self._serial = 0

    def engine(self, blocks: int, swap: bool) -> Engine:
        """An engine over the first `blocks` blocks of the cache."""
        first = self.first
        old = first.pages
        if blocks > old.num_usable_blocks:
            raise SystemExit(f"the load needs {blocks} blocks, the pool has {old.num_usable_blocks}: a larger --pool")
        pages = KVCacheManager(blocks + 1, old.block_size, old.groups, True, old.identity)
        if swap:
            assert self.host is not None and self.measured is not None
            start_swapping(pages, self.host, "auto", self.measured)
        return Engine(Scheduler(first.scheduler.config, pages), pages, first.runner, first.facts, first.asynchronous)

    def take_host(self, blocks: int) -> list[str]:
        """Pin memory and measure costs, once; the lines of the report."""
        first, config = self.first, self.first.scheduler.config
        host = self.host = take_host_memory(first.runner, blocks)
        assert host is not None
        self.measured = measure(first.runner, host, config.max_num_batched_tokens, config.max_model_len)
        nothing = KVCacheManager(2, first.pages.block_size, first.pages.groups)
        return start_swapping(nothing, host, "auto", self.measured)

    def run(self, engine: Engine, prompts: Prompts) -> tuple[float, list[list[int]]]:
        """Seconds until all have ended, and their tokens."""
        names = []
        ids: dict[str, list[int]] = {}
        start = time.perf_counter()
        for prompt, new in prompts:
            names.append(f"swap-{self._serial}")
            self._serial += 1
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            engine.add(NewRequest(request_id=names[-1], prompt_token_ids=prompt, sampling=params, arrival=start))
        while engine.has_work:
            for out in engine.step().outputs:
                if out.error is not None:
                    raise SystemExit(out.error)
                ids.setdefault(out.request_id, []).extend(out.new_token_ids)
        return time.perf_counter() - start, [ids[name] for name in names]


def figures(bench: Bench, engine: Engine, prompts: Prompts, before: Prompts | None = None) -> dict[str, Any]:
    """One run in a pool that has just served `before`."""
    if before is not None:
        bench.run(engine, before)
    old = engine.stats()
    seconds, ids = bench.run(engine, prompts)
    new = engine.stats()
    names = ("num_preemptions", "preemptions_swapped", "recomputed_tokens", "prefix_cache_hits", "swapped_out_bytes")
    found = {name: getattr(new, name) - getattr(old, name) for name in (*names, "swapped_in_bytes", "steps")}
    return {"seconds": seconds, "tok_s": sum(map(len, ids)) / seconds, "ids": ids, **found}


HEAD = (
    "| part | pool | blocks | seconds | tokens/s | of the whole pool | steps | preemptions (K/V kept) "
    "| recomputed tokens | cached prompt tokens | copied out, MiB | back, MiB | same tokens |\n" + "|---" * 13 + "|"
)


def part(bench: Bench, name: str, prompts: Prompts, whole: int, before: Prompts | None) -> list[dict[str, Any]]:
    """The whole pool, half of it, and half of it with host memory; each row is printed as soon as it is there."""
    rows: list[dict[str, Any]] = []
    for pool, blocks, swap in (("whole", whole, False), ("half", whole // 2, False), ("half, swap", whole // 2, True)):
        found = figures(bench, bench.engine(blocks, swap), prompts, before)
        rows.append({"part": name, "row": pool, "blocks": blocks, **found})
        print(line(rows[-1], rows[0]), flush=True)
    return rows


def line(r: dict[str, Any], whole: dict[str, Any]) -> str:
    same = sum(a == b for a, b in zip(r["ids"], whole["ids"], strict=True))
    return (
        f"| {r['part']} | {r['row']} | {r['blocks']:,} | {r['seconds']:.2f} | {r['tok_s']:,.0f} "
        f"| {whole['seconds'] / r['seconds']:.1%} | {r['steps']} | {r['num_preemptions']} ({r['preemptions_swapped']}) "
        f"| {r['recomputed_tokens']:,} | {r['prefix_cache_hits']:,} | {r['swapped_out_bytes'] / 2**20:,.0f} "
        f"| {r['swapped_in_bytes'] / 2**20:,.0f} | {same} of {len(r['ids'])} |"
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SIZES)
    parser.add_argument("--weights", default="bf16", choices=WEIGHTS)
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--pool", type=int, default=8 << 30, help="bytes of the KV cache that is built")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    count, given, new, documents, length, answer = SIZES[args.shape]
    bench = Bench(args)
    size, vocab = bench.first.pages.block_size, bench.first.facts.vocab_size

    def made(count: int, given: int, new: int, seed: int) -> Prompts:
        return [(token_ids(ask, 0, vocab), new) for ask in asks("random", count, given, new, 0.0, seed)]

    whole = count * -(-(given + new) // size) * 102 // 100 + 1
    again = documents * -(-(length + answer) // size) * 102 // 100 + 1
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    layers = SHAPES[args.shape]["num_hidden_layers"]
    about = f"{gpu}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {args.weights}, KV {args.kv_dtype}"
    about += f", {layers} layers; engine built in {bench.ready_s:.1f} s"
    lines = bench.take_host(max(whole, again))
    print("\n".join([about, *lines, HEAD]), flush=True)
    bench.run(bench.engine(whole, False), made(min(8, count), given, 4, 1))
    rows = part(bench, "load", made(count, given, new, 2), whole, None)
    asked = made(documents, length, answer, 3)
    rows += part(bench, "again", asked, again, asked)
    if args.json:
        plain = [{k: v for k, v in row.items() if k != "ids"} for row in rows]
        args.json.write_text(json.dumps({"about": about, "lines": lines, "rows": plain}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
