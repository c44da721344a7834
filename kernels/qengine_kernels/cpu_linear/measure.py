"""What is fast on this CPU, measured once per process.

Three answers: the fastest bf16 GEMM, and the largest batches for which int4 and int8 beat it. Weights are rotated so
that they come from memory and not from the cache, as in a real step.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qengine_kernels.cpu_linear.dense import DenseCpuLinear, Way, packed_available
from qengine_kernels.cpu_linear.few_rows import int8_available, round_channels
from qengine_kernels.cpu_linear.int4 import int4_available, pack_codes

SIZE = 1024
GROUP = 64
COPIES = 6
BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
TWICE_THE_BYTES = 1.3
"""float32 weights must be faster by this factor before they are kept instead of 16-bit ones."""


@dataclass(frozen=True)
class CpuTuning:
    """`dense`: the bf16 way; `int4_limit`: largest M for which int4 runs; `int8_limit`: the same for int8 copies of
    output layers."""

    dense: Way
    int4_limit: int
    int8_limit: int = 0


def best_time(run: Callable[[], object], repeat: int = 4, calls: int = 3) -> float:
    """Seconds of one call: the fastest of `repeat` rounds, so that a busy machine disturbs little."""
    run()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def rotating(ops: list[Callable[[torch.Tensor], torch.Tensor]], m: int) -> Callable[[], torch.Tensor]:
    """A call that takes the next of equal ops each time, on a bf16 batch of m rows."""
    cycle = itertools.cycle(ops)
    x = torch.ones(m, SIZE, dtype=torch.bfloat16)
    return lambda: next(cycle)(x)


def measure_dense(weight: torch.Tensor) -> tuple[Way, dict[int, float]]:
    """The best way for bf16 by the product of its times at M = 1, 16 and 64, and its time for each batch."""
    ways: list[Way] = ["plain", "float32"]
    if packed_available():
        ways.insert(0, "packed")
    scores: dict[Way, float] = {}
    ops: dict[Way, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
    for way in ways:
        ops[way] = [DenseCpuLinear(weight.clone(), None, torch.bfloat16, way) for _ in range(COPIES)]
        score = 1.0
        for m in (1, 16, 64):
            score *= best_time(rotating(ops[way], m), repeat=3, calls=2)
        scores[way] = score * (TWICE_THE_BYTES**3 if way == "float32" else 1.0)
    best = min(ways, key=lambda w: scores[w])
    return best, {m: best_time(rotating(ops[best], m)) for m in BATCHES}


def measure_int4(codes: torch.Tensor, dense: dict[int, float]) -> int:
    """The largest batch up to which int4 is faster than the dense times given."""
    if not int4_available():
        return 0
    packed = [pack_codes(codes) for _ in range(COPIES)]
    pairs = torch.ones(SIZE // GROUP, SIZE, 2, dtype=torch.bfloat16)

    def op(p: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch._weight_int4pack_mm_for_cpu(x, p, GROUP, pairs)

    return faster_up_to([op(p) for p in packed], dense)


def measure_int8(weight: torch.Tensor, dense: dict[int, float]) -> int:
    """The largest batch up to which a product with int8 weights is faster than the dense times given."""
    if not int8_available():
        return 0
    codes, scales = round_channels(weight)

    def op(c: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch._weight_int8pack_mm(x, c, scales)

    return faster_up_to([op(codes.clone()) for _ in range(COPIES)], dense)


def faster_up_to(ops: list[Callable[[torch.Tensor], torch.Tensor]], dense: dict[int, float]) -> int:
    """The largest of the leading BATCHES for which equal `ops` are faster than the dense times given."""
    limit = 0
    for m in BATCHES:
        if best_time(rotating(ops, m)) >= dense[m]:
            break
        limit = m
    return limit


@functools.cache
def tuning() -> CpuTuning:
    """Measure this machine, once. Takes about a tenth of a second; torch's thread count is as before afterwards."""
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        try:
            torch.set_num_threads(1)
            weight = torch.randn(SIZE, SIZE, generator=generator).to(torch.bfloat16)
            codes = torch.randint(0, 16, (SIZE, SIZE), generator=generator, dtype=torch.int32)
            dense, times = measure_dense(weight)
            int4, int8 = measure_int4(codes, times), measure_int8(weight, times)
        finally:
            torch.set_num_threads(threads)
    return CpuTuning(dense, int4, int8)
