"""A report as one HTML file that needs nothing beside it: text, tables, and plots by matplotlib as embedded PNGs."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qengine.errors import ConfigError

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } figure { margin: 1rem 0; } figcaption { color: #555; font-size: .9rem; }
"""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    """`headers` and the cells of each row as text; cells that are numbers stand at the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG with what it shows in words."""

    png: bytes
    caption: str


Part = Heading | Text | Table | Picture


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise ConfigError where the extra for reports isn't installed; asked before long work."""
    if not has_matplotlib():
        raise ConfigError(
            "an HTML report needs matplotlib, which is not installed", hint="pip install 'qengine-llm[report]'"
        )


def draw(paint: Callable[[Any], None], width: float = 8.0, height: float = 3.2) -> bytes:
    """PNG of a figure (inches) that `paint(axes)` fills. No display and no global matplotlib state is used."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    paint(axes)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def page(title: str, parts: Sequence[Part]) -> str:
    """The whole HTML document; every text is escaped."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(_render(part) for part in parts)
    top = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n<h1>{html.escape(title)}</h1>\n'
    return f"{top}{body}\n</body></html>\n"


def _render(part: Part) -> str:
    match part:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Table(headers, rows):
            numbers = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headers))]
            lines = [_row("th", headers, numbers), *(_row("td", row, numbers) for row in rows)]
            return "<table>\n" + "\n".join(lines) + "\n</table>"
        case Picture(png, caption):
            data = base64.b64encode(png).decode()
            words = html.escape(caption)
            return (
                f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
                f"<figcaption>{words}</figcaption></figure>"
            )


def _row(tag: str, cells: Sequence[str], numbers: Sequence[bool]) -> str:
    kinds = (' class="number"' if n else "" for n in numbers)
    return "<tr>" + "".join(f"<{tag}{k}>{html.escape(c)}</{tag}>" for c, k in zip(cells, kinds, strict=True)) + "</tr>"


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:2] in ("+0", "-0") or text == ""


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e


def check_writable(path: str | None) -> Path | None:
    """The path of a report that is yet to be made; its folder must exist. Raises ConfigError before long work."""
    if path is None:
        return None
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"{path} cannot be written", have="no such folder" if not target.is_dir() else "a folder",
                          need="a file in a folder that exists")
    return target
