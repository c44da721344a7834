"""Replays captured steps beside the same steps run kernel by kernel, before the engine is ready.

A graph is a list of kernels, addresses and an order. What is wrong with one (memory that was given back, work that was
not recorded, a kernel that starts before its inputs are there) shows in values and nowhere else, and may depend on the
GPU, the driver and the model. So sizes are compared once, here; graphs that give other values are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from qengine.core.request import Request
from qengine.core.step import ScheduledSequence, Step
from qengine.runtime.inputs import StepInputs
from qengine.runtime.runner import Runner
from qengine.sampling_params import SamplingParams

FAR = 0.05
"""Relative difference from which a graph is wrong. The kernels are the same, so there should be none; a library may
choose another of its kernels for another stream."""
ROWS = 16
"""Rows that are compared at a time."""


class Graphs(Protocol):
    """Captured steps: `DecodeGraphs` or `PromptGraphs`."""

    sizes: list[int]
    rows: int
    hidden: torch.Tensor

    def fill(self, inputs: StepInputs) -> int | None: ...

    def forward(self, size: int) -> None: ...

    def replay(self, size: int) -> None: ...


def check_graphs(runner: Runner, longest: int) -> list[str]:
    """Take from the runner the graphs that give other values. Report lines. `longest`: tokens of a sequence, at most.

    Uses blocks of the cache, which nobody may have yet, and leaves them zero.
    """
    lines: list[str] = []
    worst, count = 0.0, 0
    kinds: list[tuple[Graphs | None, str]] = [(runner.graphs, "decodes"), (runner.prompt_graphs, "prompts")]
    for graphs, what in kinds:
        for size in _checked_sizes(runner, graphs):
            assert graphs is not None
            lens = decode_lens(size) if what == "decodes" else prompt_lens(size, graphs.rows)
            apart = difference(runner, graphs, size, lens, longest)
            if not apart <= FAR:
                lines.append(
                    f"WARNING: CUDA graphs: none for {what}, because a replayed step of {size} gives values that are "
                    f"{apart:.2g} apart from those of the same kernels run one by one"
                )
                runner.prompt_graphs = None
                if what == "decodes":
                    runner.use_graphs(None)
                    return lines
                break
            worst, count = max(worst, apart), count + 1
    if count:
        lines.append(f"CUDA graphs: {count} replayed beside the same kernels run one by one, {worst:.2g} apart at most")
    return lines


def _checked_sizes(runner: Runner, graphs: Graphs | None) -> list[int]:
    """All; the least and the largest where each pass copies weights from host memory, which may take seconds."""
    if graphs is None:
        return []
    return graphs.sizes if runner.weights is None else sorted({graphs.sizes[0], graphs.sizes[-1]})


def decode_lens(size: int) -> list[tuple[int, int]]:
    """(cached tokens, new tokens) of each sequence."""
    return [(i % 8, 1) for i in range(size)]


def prompt_lens(size: int, rows: int) -> list[tuple[int, int]]:
    """The same for a step of one token less than is captured: a decode, a prompt that goes on, and one that begins."""
    if rows < 3:
        return [(3, size - 1)]
    half = (size - 2) // 2
    return [(5, 1), (21, half), (0, size - 2 - half)]


@torch.inference_mode()
def difference(runner: Runner, graphs: Graphs, size: int, lens: Sequence[tuple[int, int]], longest: int) -> float:
    """How far the hidden states of a replayed step are from those of the same one run kernel by kernel. The step is
    shortened to what `longest` and the cache allow."""
    sequences = list(_sequences(runner, lens, longest))
    inputs = runner.inputs.build(Step(sequences=sequences))
    graphs.fill(inputs)
    tokens = inputs.batch.num_tokens
    graphs.forward(size)
    hidden = graphs.hidden[:tokens].clone()
    graphs.hidden.zero_()
    graphs.replay(size)
    apart = _apart(graphs.hidden[:tokens], hidden)
    for s in sequences:
        runner.forget(s.request.request_id)
    runner.cache.zero_blocks([block for s in sequences for table in s.request.block_tables for block in table])
    return apart


def _sequences(runner: Runner, lens: Sequence[tuple[int, int]], longest: int) -> Iterator[ScheduledSequence]:
    """Sequences in blocks of their own, as many as the cache has."""
    size, groups = runner.cache.block_size, runner.inputs.num_groups
    blocks = iter(range(1, runner.cache.storage[0].shape[0]))
    left = (runner.cache.storage[0].shape[0] - 1) // groups
    for i, (start, wanted) in enumerate(lens):
        start = min(start, longest - 1)
        count = min(wanted, longest - start, left * size - start)
        if count < 1:
            return
        need = -(-(start + count) // size)
        left -= need
        ids = [(7919 * (i + 1) + 31 * j) % runner.model.vocab_size for j in range(start + count)]
        request = Request(f"graph-check-{i}", ids, 1, sampling=SamplingParams(temperature=0.0))
        request.block_tables = [[next(blocks) for _ in range(need)] for _ in range(groups)]
        yield ScheduledSequence(request, start, count, True)


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative difference of two matrices; infinite where not the same values are finite. Some rows at a time: the
    logits of a large step may be all that memory has left."""
    sums = torch.zeros(3, device=want.device)
    """Of squared differences, of squares, and how many values are finite in one of the two only."""
    for some, others in zip(got.split(ROWS), want.split(ROWS), strict=True):
        finite = others.isfinite()
        sums[2] += (finite != some.isfinite()).sum()
        some, others = (torch.where(finite & t.isfinite(), t, 0).float() for t in (some, others))
        sums[0] += (some - others).square().sum()
        sums[1] += others.square().sum()
    off, size, unlike = sums.tolist()
    return float("inf") if unlike else (off / max(size, 1e-30)) ** 0.5
