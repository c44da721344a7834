"""How many tokens the KV cache of each KV dtype holds in the same number of bytes: engines are built, pools measured.

    python benchmarks/kv_capacity.py auto fp8 int8 int4 k=fp8_e4m3,v=int4 [--model FOLDER] [--bytes 256M]

A pool is what was allocated, the null block and inline scales included.
"""

from __future__ import annotations

import argparse

from qengine.cli.options import number
from qengine.config import EngineConfig
from qengine.prepare import prepare_model
from qengine.runtime.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kv_dtypes", nargs="+")
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bytes", type=number, default=256 << 20)
    args = parser.parse_args()
    print("| KV dtype | pool, bytes | bytes for one token | tokens | of the first |")
    print("|---|---|---|---|---|")
    first = None
    for kv in args.kv_dtypes:
        config = EngineConfig(
            model=args.model, device=args.device, kv_cache_dtype=kv, kv_cache_memory_bytes=args.bytes, max_num_seqs=1
        )
        engine = Engine.from_config(prepare_model(config, lambda line: None))
        storage, tokens = engine.runner.cache.storage, engine.facts.kv_tokens
        pool = sum(t.numel() * t.element_size() for t in storage)
        per_token = sum(t.shape[1] for t in storage) / engine.facts.block_size
        first = first or tokens
        print(f"| {kv} | {pool:,} | {per_token:,.0f} | {tokens:,} | {tokens / first:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
