"""The progress bar of long commands: share done, time gone and time to go, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Tick = Callable[[int, int], None]
"""Called with (done, in all)."""


@contextmanager
def bar(name: str, quiet: bool = False) -> Iterator[Tick]:
    """Yields the function that moves the bar, which appears at its first call; `quiet` draws nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    shown = Progress(*columns, console=Console(stderr=True), disable=quiet)
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
