"""The table of checks in docs/plugins.md, made from the checks.

    python -m qengine.conformance.check_table --write docs/plugins.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from qengine.conformance.kv_suite import KV_CHECKS
from qengine.conformance.weight_suite import WEIGHT_CHECKS

BEGIN, END = "<!-- checks:begin -->\n", "<!-- checks:end -->"


def check_table() -> str:
    """Markdown, one row a check."""
    rows = ["| kind | check | what holds |", "|---|---|---|"]
    for kind, checks in (("weight", WEIGHT_CHECKS), ("kv", KV_CHECKS)):
        for check in checks:
            rows.append(f"| {kind} | `{check.name}` | {check.what}{' (on a GPU)' if check.gpu else ''} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """`text` with the table between its markers."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + check_table() + END + rest.split(END)[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the document that holds the markers")
    path = parser.parse_args(argv).write
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
