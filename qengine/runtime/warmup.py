"""Runs steps of typical sizes before the engine is ready, so that no request pays for compilation or first use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from qengine.core.request import Request
from qengine.core.step import ScheduledSequence, Step
from qengine.runtime.cache_dir import cache_root
from qengine.runtime.report import gib
from qengine.runtime.runner import Runner
from qengine.runtime.sampler import needs_ids
from qengine.runtime.sampling_kernels import wrong_floors, wrong_maxima
from qengine.runtime.threads import SIZES, ThreadChoice, choose_threads
from qengine.sampling_params import SamplingParams
from qengine_kernels import cpu_fused
from qengine_kernels.compile_watch import kernels_compiled
from qengine_kernels.row_max.reference import row_max_reference
from qengine_kernels.top_floor.reference import top_floor_reference

GREEDY = SamplingParams(temperature=0.0)
LARGEST_DECODE = 256
CONTEXT = 48
"""Cached tokens in front of a warm-up prefill."""
CPU_LENGTH = 32
"""Tokens of a prefill that settles lazy things on a CPU, where nothing is compiled."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.1, "logit_bias": {0: 1.0}},
)
"""One of each way through the sampler."""


def warm_up(
    runner: Runner, batched_tokens: int, max_num_seqs: int, max_model_len: int, device: torch.device
) -> list[str]:
    """Run steps of many sizes on the null block, then zero it.

    Returns lines for the start-up report.
    """
    start = time.perf_counter()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    kernels = len(kernels_compiled())
    lines = _check_sampling(runner) if on_gpu else [cpu_fused.prepare(cache_root() / "cpu-kernels")]
    longest = max_model_len - 1
    lens = step_sizes(batched_tokens, max_num_seqs, longest) if on_gpu else [[min(CPU_LENGTH, longest)], [1]]
    for query_lens in lens:
        _run(runner, query_lens, longest)
    _sample(runner, max_num_seqs, longest)
    if not on_gpu:
        runner.threads = _measure_threads(runner, max_num_seqs)
    runner.cache.zero_blocks([0])
    lines.append(f"Warm-up took {time.perf_counter() - start:.2f} seconds")
    if runner.threads is not None:
        lines.append(runner.threads.line())
    if on_gpu:
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        made = len(kernels_compiled()) - kernels
        lines.append(f"Kernels compiled or loaded while warming up: {made}, in {len(lens)} steps of other sizes")
        lines.append(f"Activations measured while warming up ({batched_tokens} tokens): {gib(peak)}")
    return lines


def _check_sampling(runner: Runner) -> list[str]:
    """Plain torch where the kernels of sampling would give other tokens; a report line then."""
    sampler, lines = runner.sampler, []
    wrong = wrong_maxima(sampler.device, sampler.vocab_size, sampler.row_max)
    if wrong is not None:
        sampler.row_max = row_max_reference
        lines.append(
            f"WARNING: maxima of logits are found by plain torch, because the kernels here find others ({wrong})"
        )
    wrong = wrong_floors(sampler.device, sampler.vocab_size, sampler.top_floor)
    if wrong is not None:
        sampler.top_floor = top_floor_reference
        lines.append(f"WARNING: top_p sorts by plain torch, because the kernel here keeps other tokens ({wrong})")
    return lines


def step_sizes(batched_tokens: int, max_num_seqs: int, longest: int) -> list[list[int]]:
    """Query lengths of the steps that reach every kernel on a GPU: tokens of each sequence, decodes first.

    Launchers choose tiles by the number of tokens or sequences, mostly at powers of two, and Triton compiles a kernel
    anew for sizes that are 1, divisible by 16, or neither. So: prefills and decodes of each power of two and one more,
    mixtures of both, several prefills, and the largest step.
    """

    def around(most: int) -> list[int]:
        powers = [1 << i for i in range(most.bit_length())]
        return sorted({n for p in powers for n in (p, p + 1) if n <= most} | {most})

    most_decodes = min(max_num_seqs, batched_tokens)
    steps = [[n] for n in around(min(batched_tokens, longest))]
    steps += [[1] * n for n in around(min(most_decodes, LARGEST_DECODE))]
    for decodes in (1, 16, 33):
        for tokens in (2, 16, 100, 1024):
            if decodes < most_decodes and decodes + tokens <= batched_tokens and tokens <= longest:
                steps.append([1] * decodes + [tokens])
    several = min(batched_tokens // 3, longest)
    if several > 1 and max_num_seqs > 2:
        steps.append([several, several, several])
    whole, rest = divmod(batched_tokens, longest)
    if whole and whole + (rest > 0) <= max_num_seqs:
        steps.append([longest] * whole + [rest] * (rest > 0))
    return steps


def time_prefill(runner: Runner, batched_tokens: int, max_model_len: int) -> float:
    """Seconds for each token of the longest step that one prompt can fill, the better of two; once warmed up."""
    tokens = max(1, min(batched_tokens, max_model_len - 1))
    times = []
    for _ in range(2):
        start = time.perf_counter()
        _run(runner, [tokens], max_model_len - 1)
        times.append(time.perf_counter() - start)
    return min(times) / tokens


def _run(runner: Runner, query_lens: Sequence[int], longest: int) -> None:
    """One step of these lengths. Sequences that prefill have a cached beginning where there is room for it."""
    groups, size = runner.inputs.num_groups, runner.cache.block_size
    sequences = []
    for i, n in enumerate(query_lens):
        start = min(CONTEXT, longest - n) if n > 1 else 0
        sequences.append(_sequence(f"warm-up-{i}", n, size, groups, start))
    runner.execute(Step(sequences=sequences))
    _forget(runner, sequences)


def _sample(runner: Runner, max_num_seqs: int, longest: int) -> None:
    """Two steps of every way of sampling, the second one on ids that the host has not seen."""
    groups, size = runner.inputs.num_groups, runner.cache.block_size
    ways = [SamplingParams(**way) for way in SAMPLING][:max_num_seqs]
    sequences = [_sequence(f"warm-up-{i}", 1, size, groups, 0, params) for i, params in enumerate(ways)]
    first = runner.launch(Step(sequences=sequences))
    if longest > 1:
        following = [ScheduledSequence(s.request, 1, 1, True) for s in sequences if not s.request.needs_ids]
        runner.collect(runner.launch(Step(sequences=following)))
    runner.collect(first)
    _forget(runner, sequences)


def _forget(runner: Runner, sequences: Sequence[ScheduledSequence]) -> None:
    for s in sequences:
        runner.forget(s.request.request_id)


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


def _sequence(
    name: str, tokens: int, block_size: int, num_groups: int, start: int = 0, sampling: SamplingParams = GREEDY
) -> ScheduledSequence:
    """One sequence that computes `tokens` prompt tokens behind `start` others; its blocks are all the null block."""
    blocks = [0] * (-(-(start + tokens + 1) // block_size))
    request = Request(name, [0] * (start + tokens), 1, needs_ids=needs_ids(sampling), sampling=sampling)
    request.block_tables = [list(blocks) for _ in range(num_groups)]
    return ScheduledSequence(request, start, tokens, True)
