"""How kernels are timed: device events around the replay of one CUDA graph over data that no cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD_BYTES = 250_000_000
"""What one graph reads at least, several times any L2 cache, so that no call finds its data there."""


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = 7) -> float:
    """Microseconds of one call: the median over replays of a graph of all calls, over their number."""
    return turns_us([calls], replays)[0]


def turns_us(contenders: Sequence[Sequence[Callable[[], Any]]], replays: int = 7) -> list[float]:
    """`graph_us` of several, whose graphs are replayed in turns, to and fro: a clock that falls while a chip gets warm
    falls for all of them, and none always comes after the same other one, which may have left the chip warmer."""
    graphs = [_captured(calls) for calls in contenders]
    times: list[list[float]] = [[] for _ in graphs]
    turn = list(zip(graphs, contenders, times, strict=True))
    for i in range(replays):
        for graph, calls, of in turn if i % 2 == 0 else turn[::-1]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            of.append(start.elapsed_time(end) * 1e3 / len(calls))
    return [statistics.median(of) for of in times]


def _captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def conditions() -> dict[str, str]:
    """What belongs to every figure: the GPU's name and the versions of torch and triton."""
    import triton

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def copies(nbytes: int, least: int = 2) -> int:
    """How many sets of data of `nbytes` each are cold."""
    return max(least, -(-COLD_BYTES // nbytes))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error, infinite where anything is not a number."""
    value = ((got.float() - want.float()).norm() / want.float().norm()).item()
    return value if value == value else float("inf")
