"""The progress of long commands on stderr: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Tick = Callable[[int, int], None]
"""Called with (done, in all)."""
LINE_EVERY_S = 15.0
"""Between two lines where stderr is no terminal: enough to see that work goes on."""


@contextmanager
def bar(name: str, quiet: bool = False) -> Iterator[Tick]:
    """Yields the function that moves the bar, which appears at its first call; `quiet` shows nothing. Where stderr is
    no terminal, lines with the share done, the time gone and the time to go stand for it."""
    if quiet or not sys.stderr.isatty():
        yield _silent if quiet else _Lines(name)
        return
    from rich import progress as rich  # here: half a second that a start with nothing to prepare need not pay
    from rich.console import Console

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn(),
               rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn())  # fmt: skip
    shown = rich.Progress(*columns, console=Console(stderr=True))
    task = shown.add_task(name, total=None)

    def tick(done: int, total: int) -> None:
        if not shown.live.is_started:
            shown.start()
        shown.update(task, completed=done, total=total)

    try:
        yield tick
    finally:
        if shown.live.is_started:
            shown.stop()


def _silent(done: int, total: int) -> None:
    pass


class _Lines:
    """A `Tick` that prints a line at the end and, before it, one at most every LINE_EVERY_S seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = self.said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self.said < LINE_EVERY_S:
            return
        self.said, gone = now, now - self.began
        left = f", about {_clock(gone / done * (total - done))} left" if 0 < done < total else ""
        print(f"{self.name}: {done / total:.0%}, {_clock(gone)} gone{left}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
