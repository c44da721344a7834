"""The tables of `qengine plan`, for people."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from qengine.core.memory import format_bytes
from qengine.runtime.plan_report import MemoryReport, PlanReport

DEVICE_LINES = 5
"""The first lines of a memory report describe the device; the others add up."""


def _console() -> Console:
    width = None if sys.stdout.isatty() else 120  # a pipe has no width of its own
    return Console(width=width, highlight=False, emoji=False, markup=False, soft_wrap=True)


def show(report: PlanReport, goal: str | None = None) -> None:
    """Print the report; `goal`: that of --fit, where it was asked for."""
    console = _console()
    console.print(f"{report.model} on {report.device}")
    console.print()
    if report.choices:
        table = _table("Chosen", "")
        for name, value in [*report.choices.items(), *report.kernels.items()]:
            table.add_row(name, value)
        console.print(table)
    if report.memory is not None:
        _show_memory(report.memory, console)
    for note in report.notes:
        console.print(f"Note: {note}" if not note.startswith("WARNING") else note)
    if report.refused is not None:
        console.print(f"Refused: {report.refused}")
        if report.would_work:
            console.print(f"With these flags it starts: {report.would_work}")
    else:
        console.print("It fits." if report.here else "It would fit.")
    if goal is not None:
        _show_fit(report, console, goal)


def _show_memory(memory: MemoryReport, console: Console) -> None:
    table = _table("Memory", "bytes")
    for name, size in memory.lines[:DEVICE_LINES]:
        table.add_row(name, format_bytes(size))
    table.add_section()
    for name, size in memory.lines[DEVICE_LINES:]:
        table.add_row(name, format_bytes(size))
    table.add_section()
    table.add_row("planned in all", format_bytes(memory.planned_bytes))
    for name, size in memory.host_lines:
        table.add_row(f"pinned in host memory: {name}", format_bytes(size))
    table.add_row("KV cache for one token", format_bytes(memory.token_bytes))
    table.add_row("KV cache holds", f"{memory.kv_tokens:,} tokens")
    table.add_row(f"requests of {memory.max_model_len:,} tokens", f"{memory.concurrency:.2f} at once")
    console.print(table)
    for line in memory.ceilings:
        console.print(f"Ceiling: {line}")


def _show_fit(report: PlanReport, console: Console, goal: str) -> None:
    console.print()
    found = report.fit
    if found is None:
        console.print(f"--fit {goal}: nothing fits with the other flags as they are")
        return
    what = f"{found.memory.max_model_len:,} tokens of context, {found.streams:.2f} requests of that length at once"
    console.print(f"--fit {goal}: {found.flags or 'as asked'}")
    console.print(f"  gives {what}")
    _show_memory(found.memory, console)


def _table(*titles: str) -> Table:
    columns: list[dict[str, Any]] = [{"no_wrap": True}, {"justify": "right" if titles[1] else "left"}]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, column in zip(titles, columns, strict=True):
        table.add_column(title, **column)
    return table
