"""One stream on the CPU: qengine's AWQ decode beside transformers' in both dtypes, measured in turns in one process.

    python benchmarks/cpu_single_stream.py [--rounds N] [--tokens N]

A shared host's speed moves by half within minutes; turns of a few seconds meet the same conditions, so the ratio holds
where one long run after another does not. Prints the median of each and the ratio of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qengine import LLM, SamplingParams
from qengine.runtime.demo import demo_folder

PROMPT = "The tides matter to people all over the world, because"


def rate(generate: Callable[[int], object], tokens: int) -> float:
    """Decoded tokens a second: a run of tokens + 1 less a run of one, so that the prefill drops out."""
    times = []
    for n in (1, tokens + 1):
        start = time.perf_counter()
        generate(n)
        times.append(time.perf_counter() - start)
    return tokens / (times[1] - times[0])


def transformers_way(folder: Path, dtype: torch.dtype, threads: int) -> Callable[[int], object]:
    inputs = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(n: int) -> object:
        torch.set_num_threads(threads)
        return model.generate(**inputs, max_new_tokens=n, min_new_tokens=n, do_sample=False)

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    threads = torch.get_num_threads()
    llm = LLM(quantization="awq", kv_cache_dtype="fp8", device="cpu", kv_cache_memory_bytes=1 << 30)
    folder = demo_folder()

    def qengine_way(n: int) -> object:
        return llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))

    ways = {
        "transformers float32": transformers_way(folder, torch.float32, threads),
        "transformers bfloat16": transformers_way(folder, torch.bfloat16, threads),
        "qengine AWQ + fp8 KV": qengine_way,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(args.rounds + 1):
        for name, generate in ways.items():
            value = rate(generate, args.tokens)
            if i:  # the first round warms up
                rates[name].append(value)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name.startswith("transformers"))
    for name, values in rates.items():
        shown = ", ".join(f"{v:.1f}" for v in values)
        print(f"{name}: {medians[name]:.1f} tokens/s, {medians[name] / best:.2f}x of transformers' best ({shown})")


if __name__ == "__main__":
    main()
