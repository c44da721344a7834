"""Models on a card of 15 GiB, and what weight offload costs there: real shapes, random weights, a GPU's memory capped.

    python benchmarks/offload.py [--rows qwen2.5-32b-awq,...] [--gib 15] [--json FILE] [--set max_num_seqs=4]

Each row starts an engine whose plan may use `--gib` (less the reserve that a card of that size would keep), and whose
allocator ends at `--gib`. Offload is `auto` where the row says so. Figures: seconds from the command to the first
token; decode tokens/s for one sequence and for eight (prompts of 128, `--tokens` each; the first token does not count);
the ceiling that copying sets, which is measured pinned bandwidth over the bytes that a step copies, and what is reached
of it; peak memory of the process and of the device's tensors; how far plan and allocator are apart. Token ids are
random, ends are ignored, no text is made. A row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from qengine.bench.rows import add_row_arguments, chosen, print_rows

GIB = 1 << 30
RESERVE = 256 << 20
"""What the planner leaves free on a GPU, within the cap too."""


def llama(hidden: int, inner: int, layers: int, heads: int, vocab: int = 128256) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": vocab, "rope_theta": 500000.0,
    }  # fmt: skip


def qwen25(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 152064, "rope_theta": 1000000.0,
    }  # fmt: skip


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1000000.0,
}  # fmt: skip
COMMON = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, float | None]] = {
    "qwen2.5-7b-awq": (qwen25(3584, 18944, 28, 28, 4), AWQ, "fp8", 0.0),
    "qwen2.5-14b-awq": (qwen25(5120, 13824, 48, 40, 8), AWQ, "auto", 0.0),
    "qwen2.5-32b-awq": (qwen25(5120, 27648, 64, 40, 8), AWQ, "fp8", None),
    "llama-3.1-8b-bf16": (llama(4096, 14336, 32, 32), None, "auto", None),
    "qwen3-30b-a3b-awq": (QWEN3_MOE, AWQ, "fp8", None),
}
"""Shape, quantization_config, KV dtype, --cpu-offload-gb (None: auto)."""


def write_config(folder: Path, row: str, shape: str) -> None:
    config, quant, _, _ = ROWS[row]
    config = COMMON | config
    if shape == "tiny":
        config |= TINY | (TINY_EXPERTS if "num_experts" in config else {})
    if quant is not None:
        config["quantization_config"] = quant
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def engine_options(args: argparse.Namespace, row: str, total: int) -> dict[str, Any]:
    _, _, kv, offload = ROWS[row]
    tiny, on_gpu = args.shape == "tiny", args.device == "cuda"
    options: dict[str, Any] = {
        "load_format": "dummy", "kv_cache_dtype": kv, "device": args.device, "max_num_seqs": 8,
        "max_num_batched_tokens": 64 if tiny else 2048, "max_model_len": 512 if tiny else 4096,
        "gpu_memory_utilization": (args.gib * GIB - RESERVE) / total if on_gpu else 0.5,
    }  # fmt: skip
    if on_gpu:
        options["cpu_offload_gb"] = 1.0 if tiny and offload is None else offload
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
    from qengine.core.offload import copied_bytes
    from qengine.runtime import device as devices
    from qengine.runtime.pinned import copy_rate

    device = devices.select_device(args.device)[0]
    total = devices.memory(device).total
    devices.limit_memory(device, int(args.gib * GIB))
    devices.start_peak(device)
    options = engine_options(args, row, total)
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), row, args.shape)
        config = EngineConfig(model=name, **options)
        timed = TimedEngine(config, False, lambda line: print(line, file=sys.stderr, flush=True))
    facts, weights = timed.engine.facts, timed.engine.runner.weights
    given = 32 if args.shape == "tiny" else 128

    def run(how_many: int, new: int, seed: int) -> list[Timing]:
        made = asks("random", how_many, given, new, 0.0, seed)
        return timed.run([(token_ids(ask, 0, facts.vocab_size), new) for ask in made])

    run(1, 1, seed=1)
    found: dict[str, Any] = {
        "row": row, "first_token_s": time.time() - psutil.Process().create_time(), "engine_ready_s": timed.ready_s,
        "kv_tokens": facts.kv_tokens, "options": options, "report": facts.report,
    }  # fmt: skip
    for batch in (1, 8):
        run(batch, 4, seed=2 + batch)
        found[f"decode_{batch}"] = decode_rate(run(batch, args.tokens, seed=20 + batch))
    sizes = [] if weights is None else [source.bytes.numel() for source in weights.sources]
    copied = copied_bytes(sizes)
    stats = timed.engine.stats()
    if weights is not None and copied:
        found["pinned_rate"] = copy_rate(weights.sources[0].bytes, weights.buffers[0])
    if stats.expert_cache_queries:  # steps copy what they ask for: whole layers are no ceiling for them
        found |= {"expert_cache_queries": stats.expert_cache_queries, "expert_cache_hits": stats.expert_cache_hits}
    elif "pinned_rate" in found:
        steps = found["pinned_rate"] / copied
        found["ceiling_steps"] = steps
        found |= {"share_1": found["decode_1"] / steps, "share_8": found["decode_8"] / steps / 8}
    apart = [re.search(r"Weights and KV cache: planned .* \(([\d.]+)% apart\)", line) for line in facts.report]
    return found | {
        "offloaded_bytes": sum(sizes), "copied_bytes": copied,
        "peak_host": devices.peak_host_bytes(), "peak_device": devices.peak_bytes(device),
        "apart_percent": next((float(match[1]) for match in apart if match), None),
    }  # fmt: skip


def decode_rate(timings: Sequence[Any]) -> float:
    """Tokens a second of all sequences together, from the last first token to the end of the last sequence."""
    start, end = max(t.times[0] for t in timings), max(t.times[-1] for t in timings)
    return sum(sum(moment > start for moment in t.times) for t in timings) / (end - start)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| row | offloaded, GiB | first token, s | decode tok/s, 1 | 8 | pinned, GB/s | ceiling, steps/s | of it, 1 "
        "| 8 | KV tokens | host peak, GiB | device peak, GiB | plan apart, % |",
        "|---|" + "---|" * 12,
    ]
    for r in results:
        if "error" in r:
            lines.append(f"| {r['row']} | {r['error']} |" + " |" * 11)
            continue
        limits = ["", "", "", ""]
        if "pinned_rate" in r:
            limits[0] = f"{r['pinned_rate'] / 1e9:.1f}"
        if "ceiling_steps" in r:
            limits = [limits[0], f"{r['ceiling_steps']:.2f}"]
            limits += [f"{r['share_1']:.0%}", f"{r['share_8']:.0%}"]
        cells = [
            r["row"], f"{r['offloaded_bytes'] / GIB:.2f}", f"{r['first_token_s']:.1f}", f"{r['decode_1']:.2f}",
            f"{r['decode_8']:.1f}", *limits, f"{r['kv_tokens']:,}", f"{r['peak_host'] / GIB:.2f}",
            f"{r['peak_device'] / GIB:.2f}", f"{r['apart_percent']}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_row_arguments(parser, ROWS)
    parser.add_argument("--gib", type=float, default=15.0, help="memory of the card that is played")
    parser.add_argument("--tokens", type=int, default=33, help="of each sequence")
    parser.add_argument("--shape", default="published", choices=("published", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=JSON", help="another engine option")
    args = parser.parse_args(argv)
    args.rows = chosen(parser, "row", args.rows, ROWS)
    return args


def main(argv: Sequence[str]) -> None:
    print_rows(__file__, argv, parse(argv), measure, table)


if __name__ == "__main__":
    main(sys.argv[1:])
