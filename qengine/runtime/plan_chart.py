"""The stacked bar of `qengine plan --png`: how a device's memory is divided."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from qengine.errors import ConfigError

if TYPE_CHECKING:
    from qengine.runtime.plan_report import MemoryReport, PlanReport

GIB = 1 << 30
DEVICE = ("device total", "free at start", "used by others", "reserve", "budget")
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#ee8866", "#44bb99", "#99ddff")
IDLE = {"used by others": "#777777", "reserve": "#aaaaaa", "unused": "#eeeeee"}


def check_chart(path: str) -> None:
    """Raise ConfigError, before anything is planned, when no chart can be drawn there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib, which is not installed", hint='pip install "qengine-llm[report]"')
    if not path.endswith(".png"):
        raise ConfigError("--png writes a PNG file", have=path, need="a name that ends in .png")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--png {path}: there is no such folder", have=str(Path(path).absolute().parent))


def segments(memory: MemoryReport) -> list[tuple[str, int]]:
    """(name, bytes) from the bottom up; they add up to the device. What is offloaded is taken off the weights."""
    sizes = dict(memory.lines)
    parts = [(name, size) for name, size in memory.lines if name not in DEVICE and size > 0]
    moved = memory.offloaded_bytes
    if moved:
        largest = max((p for p in parts if p[0].startswith("weights ")), key=lambda p: p[1])
        parts[parts.index(largest)] = (f"{largest[0]} (resident)", max(0, largest[1] - moved))
    parts.append(("reserve", sizes["reserve"]))
    parts.append(("used by others", sizes["used by others"]))
    parts.append(("unused", sizes["device total"] - sum(size for _, size in parts)))
    return [(name, size) for name, size in parts if size > 0]


def draw(report: PlanReport, path: Path) -> None:
    """One bar for the plan as asked, one for what --fit found. Raises ConfigError when there is nothing to draw."""
    bars = [("as asked", report.memory), ("--fit", report.fit.memory if report.fit is not None else None)]
    drawn = [(label, memory) for label, memory in bars if memory is not None]
    if not drawn:
        raise ConfigError("--png has nothing to draw: the plan is refused", hint=report.would_work or "--fit")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5 + 2 * len(drawn), 6))
    colors: dict[str, str] = dict(IDLE)
    for place, (_, memory) in enumerate(drawn):
        bottom = 0.0
        for name, size in segments(memory):
            kind = name.split(" (")[0]
            fresh = kind not in colors
            color = colors.setdefault(kind, COLORS[(len(colors) - len(IDLE)) % len(COLORS)])
            label = kind if fresh or (kind in IDLE and place == 0) else None
            axes.bar(place, size / GIB, 0.6, bottom, color=color, label=label, edgecolor="white", linewidth=0.5)
            bottom += size / GIB
    axes.set_xticks(range(len(drawn)), [f"{label}\n{m.max_model_len:,} tokens" for label, m in drawn])
    axes.set_ylabel("GiB")
    axes.set_title(f"{report.model}\n{report.device}", fontsize=10)
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left", fontsize=8, reverse=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
