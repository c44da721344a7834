"""What scripts share that print a table whose rows are measured in a process each."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def add_row_arguments(parser: argparse.ArgumentParser, rows: Collection[str], default: str | None = None) -> None:
    """--rows (of these; `default`: all), --json and the --child of `row_in_child`."""
    names = ", ".join(rows)
    parser.add_argument("--rows", default=default or ",".join(rows), help=f"with commas, of: {names}")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def chosen(parser: argparse.ArgumentParser, what: str, text: str, known: Collection[str]) -> list[str]:
    """The names in `text`, parted by commas. Ends the program for one that is not known; `what` they are names of."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def row_in_child(script: str, argv: Sequence[str], row: str) -> dict[str, Any]:
    """The row as `script`, run again with its own `argv` and `--rows row --child`, prints it as JSON in its last line;
    where that fails, {"row", "error"}."""
    command = [sys.executable, script, *argv, "--rows", row, "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"row": row, "error": f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def conditions() -> dict[str, Any]:
    """What belongs to every figure: device, version of torch, date."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
