"""Decode steps replayed from CUDA graphs beside eager ones, on one model in one run.

    python benchmarks/cuda_graphs.py [--model FOLDER] [--quant awq] [--kv-dtype fp8] [--json FILE]

Without a model, the demo model. Prints a table of milliseconds a decode step; outputs of both ways are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from qengine import LLM, SamplingParams

BATCHES = (1, 16, 128)
STEPS = 128


def measure(llm: LLM, batch: int) -> float:
    """Seconds a decode step: a run of STEPS + 1 tokens less a run of one, so that the prefill drops out."""
    prompts = [f"Tell me a story about the number {i} and" for i in range(batch)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    many = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    seconds = {}
    for params in (one, many):
        llm.generate(prompts, params)
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds[params.max_tokens] = time.perf_counter() - start
    return (seconds[STEPS + 1] - seconds[1]) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--quant", default="awq")
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows: list[dict[str, Any]] = [{"sequences": batch} for batch in BATCHES]
    texts = []
    for way in ("eager", "graphs"):
        llm = LLM(
            args.model,
            quantization=args.quant,
            kv_cache_dtype=args.kv_dtype,
            kv_cache_memory_bytes=2 << 30,
            enforce_eager=way == "eager",
        )
        for row in rows:
            row[way] = measure(llm, row["sequences"])
        short = SamplingParams(temperature=0, max_tokens=8)
        texts.append(llm.generate("The capital of France is", short)[0].outputs[0].text)
        del llm
        torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; same text: {texts[0] == texts[1]}")
    print("| sequences | eager, ms a step | graphs, ms a step | ratio | tokens/s with graphs |\n|---|---|---|---|---|")
    for row in rows:
        eager, graphs = row["eager"], row["graphs"]
        rate = row["sequences"] / graphs
        print(f"| {row['sequences']} | {eager * 1e3:.1f} | {graphs * 1e3:.2f} | {eager / graphs:.1f} | {rate:,.0f} |")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "device": torch.cuda.get_device_name()}, indent=1))


if __name__ == "__main__":
    main()
