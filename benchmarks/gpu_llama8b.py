"""Workload W: a Llama-3.1-8B shape with random weights, made on the device, in several weight formats and KV dtypes.

    python benchmarks/gpu_llama8b.py [--rows awq+fp8,bf16+auto] [--json FILE] [--set async_scheduling=false]

Throughput: 512 prompts x 512 tokens in x 256 out, at most 256 sequences and 8192 tokens a step; prompts of the same
lengths with one token out give the prefill rate, and what is left of the time the decode rate. Latency: one prompt of
128 in, 256 out, median of three. Token ids are random, ends are ignored, no text is made. Each row runs in a process of
its own, so that `ready` counts from the command on; one row takes about a minute. Figures of vLLM 0.26 on the same card
stand beside ours, with the goals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from qengine.bench.rows import add_row_arguments, chosen, conditions, print_rows

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 1024,
    },
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
KV = ("auto", "fp8")
ROWS = tuple(f"{weights}+{kv}" for weights in WEIGHTS for kv in KV)

FIGURES = ("output", "prefill", "decode", "ms_per_token", "ttft_ms", "kv_tokens")
LOWER_IS_BETTER = ("ms_per_token", "ttft_ms")
PEER: dict[str, dict[str, float]] = {
    "bf16+auto": dict(zip(FIGURES, (9680, 42900, 17570, 5.00, 13, 839648), strict=True)),
    "awq+auto": dict(zip(FIGURES, (9311, 39480, 17550, 3.27, 12, 918432), strict=True)),
    "awq+fp8": dict(zip(FIGURES, (9866, 39880, 19450, 4.04, 15, 1835216), strict=True)),
    "fp8+fp8": dict(zip(FIGURES, (13675, 67310, 22940, 3.53, 17, 1785168), strict=True)),
}
"""vLLM 0.26.0 on one H200, 2026-11-29, the best of its kernels for each figure."""
GOALS: dict[str, dict[str, float]] = {
    "bf16+auto": {"output": 10500, "ms_per_token": 4.2},
    "awq+fp8": dict(zip(FIGURES, (11500, 43000, 24000, 1.9, 12, 1850000), strict=True)),
    "fp8+fp8": dict(zip(FIGURES[:5], (15000, 70000, 26000, 2.7, 15), strict=True)),
}


def write_config(folder: Path, shape: str, weights: str) -> None:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16", **SHAPES[shape],
    }  # fmt: skip
    if WEIGHTS[weights] is not None:
        config["quantization_config"] = WEIGHTS[weights]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def engine_options(args: argparse.Namespace, row: str) -> dict[str, Any]:
    tiny = args.shape == "tiny"
    options: dict[str, Any] = {
        "load_format": "dummy", "kv_cache_dtype": row.partition("+")[2], "device": args.device,
        "gpu_memory_utilization": 0.85, "max_num_seqs": 8 if tiny else 256, "max_model_len": args.max_model_len,
        "max_num_batched_tokens": 64 if tiny else 8192,
    }  # fmt: skip
    if tiny:
        options["kv_cache_memory_bytes"] = 8 << 20
    for text in args.set:
        name, _, value = text.partition("=")
        options[name.replace("-", "_")] = json.loads(value)
    return options


def measure(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """All figures of one row, in this process."""
    from qengine.bench.figures import Timing
    from qengine.bench.offline import TimedEngine
    from qengine.bench.prompts import asks, token_ids
    from qengine.config import EngineConfig

    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), args.shape, row.partition("+")[0])
        config = EngineConfig(model=name, **engine_options(args, row))
        timed = TimedEngine(config, False, lambda line: print(line, file=sys.stderr, flush=True))
    since_command = time.time() - psutil.Process().create_time()
    facts = timed.engine.facts
    count, given, new = (args.prompts, 512, 256) if args.shape == "8b" else (12, 32, 8)

    def run(how_many: int, given: int, new: int, seed: int) -> list[Timing]:
        made = asks("random", how_many, given, new, 0.0, seed)
        return timed.run([(token_ids(ask, 0, facts.vocab_size), new) for ask in made])

    found: dict[str, Any] = {
        "row": row, "ready_s": since_command, "engine_ready_s": timed.ready_s, "kv_tokens": facts.kv_tokens,
        "options": engine_options(args, row),
    }  # fmt: skip
    run(8, given, 4, seed=1)
    if "throughput" in args.parts:
        prefill = max(t.e2el for t in run(count, given, 1, seed=2))
        settled = steps_of(timed.engine)
        whole = max(t.e2el for t in run(count, given, new, seed=3))
        found["steps_ms"] = by_kind(settled)
        found |= {
            "output": count * new / whole,
            "prefill": count * given / prefill,
            "decode": count * (new - 1) / (whole - prefill),
        }
    if "latency" in args.parts:
        singles = [run(1, given // 4, new, seed=4 + i)[0] for i in range(3)]
        found["ms_per_token"] = 1e3 * statistics.median(t.tpot or 0.0 for t in singles)
        found["ttft_ms"] = 1e3 * statistics.median(t.ttft for t in singles)
    stats = timed.engine.stats()
    return found | {
        "steps": stats.steps, "preemptions": stats.num_preemptions, "kernels_compiled": stats.kernels_compiled,
        "synchronous_steps": stats.synchronous_steps,
    }  # fmt: skip


def steps_of(engine: Any) -> list[tuple[float, int, int]]:
    """A list to which every step is added from now on, as it is settled: when, its sequences, its tokens."""
    settled: list[tuple[float, int, int]] = []
    update = engine.scheduler.update

    def noted(step: Any, sampled: Any) -> Any:
        settled.append((time.perf_counter(), len(step.sequences), step.num_tokens))
        return update(step, sampled)

    engine.scheduler.update = noted
    return settled


def by_kind(settled: Sequence[tuple[float, int, int]]) -> dict[str, list[float]]:
    """[steps, seconds in all, median ms] of steps with prompts, of decodes of the largest batch, and of fewer."""
    most = max(sequences for _, sequences, _ in settled)
    kinds: dict[str, list[float]] = {}
    for (before, _, _), (now, sequences, tokens) in pairwise(settled):
        kind = "with prompts" if tokens > sequences else f"{most} decodes" if sequences == most else "fewer decodes"
        kinds.setdefault(kind, []).append(now - before)
    return {kind: [len(own), sum(own), 1e3 * statistics.median(own)] for kind, own in kinds.items()}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Each figure as ours (peer's; goal), with ! where ours is behind the peer's."""
    lines = [
        "| weights + KV | ready, s | output tok/s | prefill tok/s | decode tok/s | batch 1, ms/token | first token, ms "
        "| KV tokens |",
        "|---|" + "---|" * 7,
    ]
    for r in results:
        if "error" in r:
            lines.append(f"| {r['row']} | {r['error']} |" + " |" * 6)
            continue
        cells = " | ".join(_cell(r, name) for name in FIGURES)
        lines.append(f"| {r['row']} | {r['ready_s']:.1f} | {cells} |")
    return lines


def _cell(r: dict[str, Any], name: str) -> str:
    if name not in r:
        return ""
    ours, peer, goal = r[name], PEER.get(r["row"], {}).get(name), GOALS.get(r["row"], {}).get(name)

    def show(value: float) -> str:
        return f"{value:.2f}" if name in LOWER_IS_BETTER else f"{value:,.0f}"

    beside = "; ".join(text for text in (peer and show(peer), goal and f"goal {show(goal)}") if text)
    behind = peer is not None and (ours > peer if name in LOWER_IS_BETTER else ours < peer)
    return show(ours) + "!" * behind + (f" ({beside})" if beside else "")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_row_arguments(parser, ROWS)
    parser.add_argument("--parts", default="throughput,latency", help="throughput, latency or both")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompts", type=int, default=512, help="of the throughput part")
    parser.add_argument("--max-model-len", type=int, help="default: the shape's own")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=JSON", help="another engine option")
    args = parser.parse_args(argv)
    args.rows = chosen(parser, "row", args.rows, ROWS)
    args.parts = chosen(parser, "part", args.parts, ("throughput", "latency"))
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    about = {"command": "python benchmarks/gpu_llama8b.py " + " ".join(argv)}
    if not args.child:
        print(", ".join(f"{v}" for v in (conditions() | about).values()))
    print_rows(__file__, argv, args, measure, table, {**about, "peer": PEER, "goals": GOALS})


if __name__ == "__main__":
    main(sys.argv[1:])
