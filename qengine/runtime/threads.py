"""How many CPU threads a step should use: one, or all.

A small step is a thousand short operations, and waking sleeping threads for each of them can cost more than they save.
From which size on it pays depends on the model, its weight formats and the machine, so whole steps are timed before
the engine is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZES = (1, 2, 4, 8, 16, 32, 64)
PATIENCE_S = 0.25
"""A step that takes this long on one thread gets all of them, and nothing larger is tried."""
REPEATS = 5
CLEARLY = 1.1
"""Threads that other processes keep awake while this is measured wake more slowly later: a small gain is none."""


@dataclass(frozen=True)
class ThreadChoice:
    """Steps of up to `serial_tokens` tokens, and output layers of up to `serial_rows` rows, run on one thread."""

    threads: int
    serial_tokens: int
    serial_rows: int

    def for_tokens(self, num_tokens: int) -> int:
        return 1 if num_tokens <= self.serial_tokens else self.threads

    def for_rows(self, num_rows: int) -> int:
        return 1 if num_rows <= self.serial_rows else self.threads

    def line(self) -> str:
        """For the start-up report."""
        return (
            f"CPU threads: {self.threads}; one for steps of up to {self.serial_tokens} tokens and output layers of up "
            f"to {self.serial_rows} rows (measured)"
        )


def choose_threads(
    forward: Callable[[int], object], logits: Callable[[int], object], max_num_seqs: int
) -> ThreadChoice:
    """`forward(m)` computes a decode step of m sequences, `logits(m)` the output layer for m rows."""
    threads = torch.get_num_threads()
    if threads == 1:
        return ThreadChoice(1, 0, 0)
    try:
        sizes = [m for m in SIZES if m <= max_num_seqs]
        return ThreadChoice(threads, _serial_limit(forward, sizes, threads), _serial_limit(logits, sizes, threads))
    finally:
        torch.set_num_threads(threads)


def _serial_limit(run: Callable[[int], object], sizes: list[int], threads: int) -> int:
    """The largest of the leading sizes for which all threads are not clearly faster than one."""
    limit = 0
    for m in sizes:
        alone, together = _best_times(run, m, threads)
        if alone > PATIENCE_S or alone > CLEARLY * together:
            break
        limit = m
    return limit


def _best_times(run: Callable[[int], object], size: int, threads: int) -> tuple[float, float]:
    """Seconds on one thread and on all, in turns, so that a disturbance meets both."""
    best = {1: float("inf"), threads: float("inf")}
    for _ in range(REPEATS):
        for count in best:
            torch.set_num_threads(count)
            start = time.perf_counter()
            run(size)
            best[count] = min(best[count], time.perf_counter() - start)
        if best[1] > PATIENCE_S:
            break
    return best[1], best[threads]
