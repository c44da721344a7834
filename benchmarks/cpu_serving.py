"""64 mixed prompts on the demo model: qengine beside transformers, on the CPU, in one run.

    python benchmarks/cpu_serving.py [--quick] [--json PATH] [--threads N]

Each setting runs in a process of its own, so that peak memory is its own. transformers runs `generate` one prompt at a
time and in static batches of 16, which pay for the longest answer of each batch; only the tokens that were asked for
count. It gets the dtype that is the faster one on this machine for each of the two. All greedy, no early stop, the same
prompts, lengths and thread count. The table comes last.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

BATCH = 16
KV_BYTES = 1 << 30
SINGLE_NEW, SINGLE_REPEATS = 96, 3
QENGINE_SETTINGS: dict[str, dict[str, Any]] = {
    "qengine 16-bit": {},
    "qengine AWQ": {"quantization": "awq"},
    "qengine AWQ + fp8 KV": {"quantization": "awq", "kv_cache_dtype": "fp8"},
}
DTYPES = ("float32", "bfloat16")

TOPICS = (
    "the tides", "bread", "steam engines", "bees", "glaciers", "the printing press", "volcanoes", "chess",
    "lighthouses", "coffee", "bridges", "whales", "the moon", "paper", "earthquakes", "gardens",
)  # fmt: skip
QUESTIONS = (
    "Explain in one sentence why this matters:",
    "What should a child know about it? Answer:",
    "A short story that begins on a cold morning:",
    "A summary of these notes:",
)
FACTS = (
    "The harbour freezes in winter and the boats are pulled ashore.",
    "Most of the work is done before sunrise, while the air is still.",
    "Nobody has counted them since the survey of 1911.",
    "A single mistake in the measurements can spoil a whole season.",
    "Older books describe the method with drawings but without numbers.",
    "The river changes its bed every few decades.",
    "Two teams tried to repeat the experiment and only one succeeded.",
    "Prices doubled when the railway was closed for repairs.",
    "Children learn the names of the tools long before they may use them.",
    "The first machine was built in a barn and ran for eleven days.",
    "Salt keeps the surface dry, and oil keeps it from cracking.",
    "It takes about nine minutes for the signal to arrive.",
    "Visitors are asked to leave their shoes at the door.",
    "Two out of five samples were lost on the way to the laboratory.",
    "The oldest drawing of it hangs in the town hall, above the clock.",
    "In spring the colour turns from grey to a pale green.",
    "Engineers still argue about which of the three designs was cheaper.",
    "The smallest ones weigh less than a grain of rice.",
    "After the fire they rebuilt the roof with slate instead of wood.",
    "A good teacher needs one afternoon to explain the principle.",
    "The contract was signed in pencil because the ink had frozen.",
    "Every tenth piece is set aside and tested until it breaks.",
    "Its sound can be heard from the other side of the valley.",
    "The recipe was kept secret for almost two hundred years.",
    "Rain in August is bad for the harvest and good for the mill.",
)


def workload(quick: bool) -> list[tuple[str, int]]:
    """(prompt, new tokens), the same list on every machine. Prompts have about 10 to 310 tokens and no long common
    beginnings, so the prefix cache has nothing to gain; answers spread evenly over 16..256 tokens."""
    items = []
    for i in range(64):
        facts = [FACTS[(i * 5 + j * (1 + i % 4)) % len(FACTS)] for j in range(i * 29 % len(FACTS))]
        prompt = " ".join([f"Notes on {TOPICS[i % len(TOPICS)]}.", *facts, QUESTIONS[i // len(TOPICS)]])
        items.append((prompt, 16 + 4 * (i * 37 % 61)))
    return [(prompt, max(2, n // 16)) for prompt, n in items[::8]] if quick else items


def single_stream(generate: Callable[[str, int], object], new: int) -> float:
    """Decode rate of one stream in tokens a second: the time of new + 1 tokens less that of the first one, median.

    The prompts are shorter than a KV block, so the second run of one finds nothing in a prefix cache.
    """
    rates = []
    for i in range(SINGLE_REPEATS + 1):
        prompt = f"{TOPICS[i].capitalize()} matter to people all over the world, because"
        times = []
        for n in (1, new + 1):
            start = time.perf_counter()
            generate(prompt, n)
            times.append(time.perf_counter() - start)
        rates.append(new / (times[1] - times[0]))
    return statistics.median(rates[1:])  # the first one warms up


def run_transformers(folder: str, dtype: str, mode: str, quick: bool) -> dict[str, Any]:
    """mode: "probe" (single-stream decode, and a short batch), "one by one" or "batches"."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Sequence[str], new: int) -> list[list[int]]:
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
        out = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        return out[:, inputs["input_ids"].shape[1] :].tolist()

    items = workload(quick)
    if mode == "probe":
        new = 8 if quick else SINGLE_NEW
        single = single_stream(lambda prompt, n: generate([prompt], n), new)
        start = time.perf_counter()
        generate([prompt for prompt, _ in items[:BATCH]], new // 3)
        return {"single": single, "batch_seconds": time.perf_counter() - start}
    size = 1 if mode == "one by one" else BATCH
    generate(["Warm up:"] * min(size, len(items)), 4)
    tokens: list[list[int]] = []
    start = time.perf_counter()
    for i in range(0, len(items), size):
        batch = items[i : i + size]
        rows = generate([prompt for prompt, _ in batch], max(n for _, n in batch))
        tokens += [row[:n] for row, (_, n) in zip(rows, batch, strict=True)]
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def run_qengine(folder: str, setting: str, quick: bool) -> dict[str, Any]:
    from qengine import LLM, SamplingParams

    slots = watch_slots()
    llm = LLM(model=folder, device="cpu", kv_cache_memory_bytes=KV_BYTES, **QENGINE_SETTINGS[setting])
    items = workload(quick)

    def params(new: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)

    single = single_stream(lambda prompt, n: llm.generate([prompt], params(n)), 8 if quick else SINGLE_NEW)
    slots.clear()
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in items], [params(n) for _, n in items])
    seconds = time.perf_counter() - start
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    waste = sum(wasted for _, wasted in slots) / max(1, sum(allocated for allocated, _ in slots))
    return {"seconds": seconds, "tokens": tokens, "single": single, "kv_waste": waste}


def watch_slots() -> list[tuple[int, int]]:
    """A list that gets (allocated, unwritten) KV slots after every step of the engines made from now on."""
    from qengine.runtime.engine import Engine

    slots: list[tuple[int, int]] = []
    step = Engine.step

    def watched(self: Engine) -> Any:
        out = step(self)
        slots.append((out.stats.kv_slots_allocated, out.stats.kv_slots_wasted))
        return out

    Engine.step = watched  # type: ignore[method-assign]
    return slots


def run_child(args: argparse.Namespace) -> None:
    """One setting in this process; the result is one JSON line, the last of stdout."""
    import torch

    torch.set_num_threads(args.threads)
    if args.child == "folder":
        result: dict[str, Any] = {"folder": prepared_folder(args.setting)}
    elif args.child == "qengine":
        result = run_qengine(args.folder, args.setting, args.quick)
    else:
        dtype, mode = args.setting.split("/")
        result = run_transformers(args.folder, dtype, mode, args.quick)
    scale = 1 if sys.platform == "darwin" else 1024
    result["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    print("\n" + json.dumps(result))


def prepared_folder(quantization: str) -> str:
    """Fetch, convert and quantise before anything is measured, as `qengine serve` does on its first start."""
    from qengine.config import EngineConfig
    from qengine.prepare import prepare_model

    config = EngineConfig(quantization=None if quantization == "none" else quantization)
    return str(prepare_model(config, lambda line: print(line, file=sys.stderr)).model)


def child(args: argparse.Namespace, kind: str, setting: str, folder: str = "") -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, "--setting", setting, "--folder", folder]
    command += ["--threads", str(args.threads)] + ["--quick"] * args.quick
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    print(f"running {kind} {setting}", file=sys.stderr, flush=True)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{kind} {setting} failed")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results by setting: seconds, tokens, single, peak_rss, and kv_waste where there is a paged cache."""
    dense = child(args, "folder", "none")["folder"]
    awq = child(args, "folder", "awq")["folder"]
    probes = {dtype: child(args, "transformers", f"{dtype}/probe", dense) for dtype in DTYPES}
    single = max(DTYPES, key=lambda dtype: probes[dtype]["single"])
    batch = min(DTYPES, key=lambda dtype: probes[dtype]["batch_seconds"])
    one = child(args, "transformers", f"{single}/one by one", dense)
    static = child(args, "transformers", f"{batch}/batches", dense)
    results = {
        f"transformers one by one, {single}": one | {"single": probes[single]["single"]},
        f"transformers batches of {BATCH}, {batch}": static | {"single": probes[batch]["single"]},
    }
    for setting, options in QENGINE_SETTINGS.items():
        results[setting] = child(args, "qengine", setting, awq if options else dense)
    return results


def summarise(results: dict[str, dict[str, Any]], items: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Rates, ratios to transformers, and how many prompts have the same first 8 tokens as transformers one by one."""
    useful = sum(n for _, n in items)
    one, static = list(results.values())[:2]
    best_single = max(one["single"], static["single"])
    rows = []
    for name, r in results.items():
        lengths = [len(t) for t in r["tokens"]]
        if lengths != [n for _, n in items]:
            sys.exit(f"{name}: wrong number of tokens, {sum(lengths)} instead of {useful}")
        same = sum(a[:8] == b[:8] for a, b in zip(r["tokens"], one["tokens"], strict=True))
        rows.append(
            {
                "setting": name,
                "tokens_per_s": useful / r["seconds"],
                "vs_one_by_one": one["seconds"] / r["seconds"],
                "vs_batches": static["seconds"] / r["seconds"],
                "single_stream": r["single"],
                "single_vs_transformers": r["single"] / best_single,
                "peak_rss": r["peak_rss"],
                "kv_waste": r.get("kv_waste"),
                "same_start": same / len(items),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| setting | useful tokens/s | vs one by one | vs batches | one stream, tokens/s | vs transformers "
        "| peak RSS | KV waste | same first 8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        waste = "" if r["kv_waste"] is None else f"{r['kv_waste']:.1%}"
        lines.append(
            f"| {r['setting']} | {r['tokens_per_s']:.1f} | {r['vs_one_by_one']:.2f}x | {r['vs_batches']:.2f}x "
            f"| {r['single_stream']:.1f} | {r['single_vs_transformers']:.2f}x | {r['peak_rss'] / 2**20:.0f} MiB "
            f"| {waste} | {r['same_start']:.0%} |"
        )
    return "\n".join(lines)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    names = ("qengine-llm", "torch", "transformers")
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/cpu_serving.py" + " --quick" * args.quick,
        "device": cpu_name(),
        "threads": args.threads,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in names},
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    flags = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f} " in text.replace("\n", " ")]
    return f"{model or platform.processor()} ({', '.join(flags)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 prompts with few tokens: does it run at all")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every setting")
    parser.add_argument("--json", type=Path, default=Path("cpu_serving.json"), help="where to write all numbers")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args)
        return
    about = conditions(args)
    items = workload(args.quick)
    rows = summarise(measure(args), items)
    args.json.write_text(json.dumps({**about, "prompts": len(items), "rows": rows}, indent=2) + "\n")
    print(f"{about['date']}, {about['device']}, {args.threads} threads, load {about['load_average']:.1f} at the start")
    print(f"{about['versions']}, {len(items)} prompts, {sum(n for _, n in items)} new tokens: {about['command']}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
