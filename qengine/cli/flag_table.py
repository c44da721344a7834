"""The README's flag table, made from the config fields: `python -m qengine.cli.flag_table [--write] README.md`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qengine.cli.options import Parser, default_of, flags_of
from qengine.config import NOT_BUILT, EngineConfig, Option, options
from qengine.server.config import ServerConfig

BEGIN, END = "<!-- flags:begin -->", "<!-- flags:end -->"


def flag_table() -> str:
    """One Markdown table with a row for each flag of `qengine serve`, by group, those that are not built last."""
    rows = [(field, opt) for config in (EngineConfig, ServerConfig) for field, opt in options(config)]
    groups = sorted(dict.fromkeys(opt.group for _, opt in rows), key=lambda g: g == NOT_BUILT)
    lines = ["| flag | default | what it does |", "|---|---|---|"]
    for group in groups:
        lines.append(f"| **{group}** | | |")
        lines += [_row(field, opt) for field, opt in rows if opt.group == group]
    return "\n".join(lines)


def _row(field: dataclasses.Field[Any], opt: Option) -> str:
    names = ", ".join(f"`{flag}`" for flag in flags_of(field, opt))
    default = default_of(field, opt)
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = "" if default in (None, (), "") else f"`{default}`"
    choices = f" ({', '.join(f'`{c}`' for c in opt.choices)})" if opt.choices else ""
    text = (opt.help + choices).replace("|", "\\|")
    return f"| {names} | {shown} | {text} |"


def with_table(text: str) -> str:
    """`text` with what stands between the markers replaced by the table of today."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{flag_table()}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """0: the file is up to date, or was written; 1: it is not."""
    parser = Parser(prog="python -m qengine.cli.flag_table", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="Bring the table up to date")
    args: argparse.Namespace = parser.parse_args(argv)
    text = args.file.read_text(encoding="utf-8")
    fresh = with_table(text)
    if args.write:
        args.file.write_text(fresh, encoding="utf-8")
    return 0 if args.write or fresh == text else 1


if __name__ == "__main__":
    sys.exit(main())
