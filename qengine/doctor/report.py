"""Everything that `qengine doctor` finds, as plain values and as text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from qengine.core.memory import format_bytes
from qengine.doctor.advice import advice
from qengine.doctor.bandwidth import Bandwidth, measure_bandwidth
from qengine.doctor.capabilities import DTYPES, Row, capability_table
from qengine.doctor.environment import Environment, look_around
from qengine.doctor.self_test import BUDGET_S, Result, self_test
from qengine.runtime.device import select_device


@dataclass
class DoctorReport:
    device: str
    environment: Environment
    capabilities: list[Row]
    self_test: list[Result]
    bandwidth: Bandwidth | None
    advice: list[str]

    @property
    def healthy(self) -> bool:
        return not any(result.state == "failed" for result in self.self_test)

    def as_json(self) -> Mapping[str, object]:
        return {"healthy": self.healthy, **dataclasses.asdict(self)}


def examine(
    device_name: str, *, quick: bool, say: Callable[[str], None], budget_s: float = BUDGET_S
) -> DoctorReport:
    """`quick` leaves out what takes time: the self-test and the bandwidths. Raises ConfigError or CapabilityError for a
    device that isn't there."""
    device, info = select_device(device_name)
    environment = look_around()
    results, bandwidth = [], None
    if not quick:
        say(f"testing kernels on {info.name or info.type}, at most {budget_s:g} seconds")
        results = self_test(device, info, budget_s)
        bandwidth = measure_bandwidth(device)
    name = f"{info.name} (sm_{info.sm})" if info.type == "cuda" else f"{info.type} {environment.cpu}"
    return DoctorReport(
        name, environment, capability_table(info), results, bandwidth, advice(environment, bandwidth, results)
    )


def show(report: DoctorReport) -> None:
    """Print the report for people."""
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, highlight=False, emoji=False, markup=False, soft_wrap=True)
    for line in environment_lines(report.environment):
        console.print(line)
    console.print()
    console.print(_capabilities(report))
    for name in DTYPES:
        reasons = {row.answers[name].reason for row in report.capabilities if row.answers[name].kind == "refused"}
        if len(reasons) == 1 and all(row.answers[name].kind == "refused" for row in report.capabilities):
            console.print(f"{name}: {reasons.pop()}")
    if report.self_test:
        console.print(_tests(report.self_test))
    if report.bandwidth is not None:
        for name, rate in dataclasses.asdict(report.bandwidth).items():
            if rate is not None:
                console.print(f"{name.replace('_', ' ')}: {rate / 1e9:.1f} GB/s")
    console.print()
    for line in report.advice or ["nothing to do"]:
        console.print(f"Advice: {line}")


def environment_lines(e: Environment) -> list[str]:
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in e.packages.items())
    features = f" ({', '.join(e.cpu_features)})" if e.cpu_features else ""
    lines = [
        f"qengine {e.qengine}, Python {e.python}, {e.system}",
        packages,
        f"driver {e.driver or 'not found'}, torch built for {f'CUDA {e.torch_cuda}' if e.torch_cuda else 'CPUs'}",
        f"CPU: {e.cpu}{features}, {e.cores} cores, {e.threads} threads",
        f"Host memory: {format_bytes(e.memory_free)} free of {format_bytes(e.memory_total)}",
    ]
    lines += [f"  held by {line}" for line in e.memory_neighbours]
    for i, gpu in enumerate(e.gpus):
        what = f"sm_{gpu.sm}, {format_bytes(gpu.free)} free of {format_bytes(gpu.total)}"
        link = f", {gpu.link}" if gpu.link else ""
        lines.append(f"GPU {i}: {gpu.name} ({what}{link}){'' if gpu.usable else ', too old'}")
        lines += [f"  held by {line}" for line in gpu.neighbours]
    return lines if e.gpus else [*lines, "GPU: none that torch can use"]


def _capabilities(report: DoctorReport) -> Table:
    table = Table(title=f"On {report.device}", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    shown = [name for name in DTYPES if any(row.answers[name].kind != "refused" for row in report.capabilities)]
    for title in ("", "format", *shown):
        table.add_column(title)
    for row in report.capabilities:
        cells = [row.answers[name] for name in shown]
        table.add_row(row.kind, row.name, *(f"{a.kind}: {a.reason}" if a.reason else a.kind for a in cells))
    return table


def _tests(results: list[Result]) -> Table:
    table = Table(title="Kernels against float32", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for title in ("test", "", "kernel, or what is wrong", "s"):
        table.add_column(title)
    for r in results:
        table.add_row(r.what, r.state, r.line, f"{r.seconds:.2f}")
    return table
