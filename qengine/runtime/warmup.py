"""Runs steps of typical sizes before the engine is ready, so that no request pays for compilation or first use."""

from __future__ import annotations

import time

import torch

from qengine.core.request import Request
from qengine.core.step import ScheduledSequence, Step
from qengine.runtime.report import gib
from qengine.runtime.runner import Runner
from qengine.runtime.threads import SIZES, ThreadChoice, choose_threads
from qengine.sampling_params import SamplingParams

DECODES = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cpu": (1, 4)}


def warm_up(
    runner: Runner, batched_tokens: int, max_num_seqs: int, max_model_len: int, device: torch.device
) -> list[str]:
    """Compute one prefill of the largest size and decodes of several batch sizes on the null block, then zero it.

    Returns lines for the start-up report.
    """
    start = time.perf_counter()
    block_size = runner.cache.block_size
    length = max(1, min(batched_tokens, max_model_len - 1, 4096 if device.type == "cuda" else 32))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    for count, tokens in [(1, length), *((n, 1) for n in DECODES[device.type] if n <= max_num_seqs)]:
        sequences = [_sequence(f"warm-up-{i}", tokens, block_size, runner.inputs.num_groups) for i in range(count)]
        runner.execute(Step(sequences=sequences))
        for s in sequences:
            runner.forget(s.request.request_id)
    if device.type == "cpu":
        runner.threads = _measure_threads(runner, max_num_seqs)
    runner.cache.zero_blocks([0])
    lines = [f"Warm-up took {time.perf_counter() - start:.2f} seconds"]
    if runner.threads is not None:
        lines.append(runner.threads.line())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        lines.append(f"Activations measured while warming up ({length} tokens): {gib(peak)}")
    return lines


def _measure_threads(runner: Runner, max_num_seqs: int) -> ThreadChoice:
    groups = runner.inputs.num_groups
    hidden = torch.zeros(max(SIZES), runner.model.hidden_size, dtype=runner.model.ctx.dtype)

    @torch.inference_mode()
    def forward(count: int) -> None:
        sequences = [_sequence(f"warm-up-{i}", 1, runner.cache.block_size, groups) for i in range(count)]
        inputs = runner.inputs.build(Step(sequences=sequences))
        runner.model.forward(inputs.token_ids, inputs.batch)
        for s in sequences:
            runner.forget(s.request.request_id)

    @torch.inference_mode()
    def logits(rows: int) -> None:
        runner.model.logits(hidden[:rows])

    return choose_threads(forward, logits, max_num_seqs)


def _sequence(name: str, tokens: int, block_size: int, num_groups: int) -> ScheduledSequence:
    """One sequence of `tokens` prompt tokens whose blocks are all the null block."""
    blocks = [0] * (-(-tokens // block_size))
    request = Request(name, [0] * tokens, 1, sampling=SamplingParams(temperature=0.0))
    request.block_tables = [list(blocks) for _ in range(num_groups)]
    return ScheduledSequence(request, 0, tokens, True)
