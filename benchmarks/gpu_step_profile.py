"""Where a decode step of workload W goes: replays of its CUDA graph timed as a whole and kernel by kernel.

    python benchmarks/gpu_step_profile.py [--row awq+fp8] [--steps 1x256,256x640] [--json FILE]

Steps are sequences x cached tokens. The whole is timed by device events over 20 replays; kernels by torch's profiler
over one, which adds some microseconds of its own between kernels. Kernels that wait inside for the one before
(`qengine_kernels.overlap`) are captured without that, as their own time would hold the waiting.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_llama8b import engine_options, write_config
from gpu_llama8b import parse as parse_workload
from torch.profiler import ProfilerActivity, profile

import qengine_kernels.overlap as overlap
from qengine.bench.offline import TimedEngine
from qengine.bench.options import pairs_of
from qengine.bench.rows import conditions
from qengine.config import EngineConfig
from qengine.runtime.graphs import DecodeGraphs

BLOCK = 16
REPLAYS = 20


def engine(row: str) -> TimedEngine:
    args = parse_workload(["--rows", row])
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), args.shape, row.partition("+")[0])
        config = EngineConfig(model=name, **engine_options(args, row))
        return TimedEngine(config, False, lambda line: print(line, file=sys.stderr, flush=True))


@torch.inference_mode()
def captured(timed: TimedEngine, sequences: int, cached: int) -> Callable[[], None]:
    """Replays the graph of one step whose sequences have `cached` tokens each, in blocks of their own."""
    runner = timed.engine.runner
    assert runner.graphs is not None
    longest = runner.graphs.max_len // BLOCK
    graphs = DecodeGraphs(runner.model, [sequences], 1, BLOCK, longest, runner.device)
    blocks = -(-cached // BLOCK)
    order = torch.randperm(timed.engine.facts.kv_tokens // BLOCK - 1, device=runner.device).int() + 1
    graphs.seq_lens[:sequences] = cached
    graphs.positions[:sequences] = cached - 1
    graphs.tables[0][:sequences, :blocks] = order[: sequences * blocks].view(sequences, blocks)
    last = graphs.tables[0][:sequences, blocks - 1].long()
    graphs.slots[0][:sequences] = last * BLOCK + (cached - 1) % BLOCK
    graphs.capture()
    return partial(graphs.replay, sequences)  # with the buffers that the graph reads


def replay_ms(replay: Callable[[], None]) -> float:
    replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def kernels_of(replay: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Calls and microseconds of each kernel in one replay, the slowest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, us = found[event.name]
            found[event.name] = count + 1, us + event.device_time_total
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def without_overlap() -> None:
    overlap.LEAST_SM = 1 << 30
    overlap.overlap.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="awq+fp8", help="as in gpu_llama8b.py")
    parser.add_argument("--steps", default="1x256,256x640", help="sequences x cached tokens, with commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    timed, steps = engine(args.row), pairs_of(args.steps, "--steps")
    together = {step: replay_ms(captured(timed, *step)) for step in steps}
    without_overlap()
    found: list[dict[str, Any]] = []
    for step in steps:
        replay = captured(timed, *step)
        found.append({"step": step, "ms": together[step], "apart_ms": replay_ms(replay), "kernels": kernels_of(replay)})
    about = conditions() | {"row": args.row}
    print(", ".join(str(value) for value in about.values()))
    for one in found:
        inside = sum(us for _, us in one["kernels"].values()) / 1e3
        shape = " x ".join(str(n) for n in one["step"])
        print(f"\n{shape}: {one['ms']:.3f} ms, {one['apart_ms']:.3f} without overlap, of which kernels {inside:.3f}")
        print("\n| kernel | calls | us | us a call |\n|---|---|---|---|")
        for name, (count, us) in list(one["kernels"].items())[:12]:
            print(f"| {name[:60]} | {count} | {us:,.0f} | {us / count:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(about | {"steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
