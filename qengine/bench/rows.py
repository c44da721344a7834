"""What scripts share that print a table whose rows are measured in a process each."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any


def add_row_arguments(parser: argparse.ArgumentParser, rows: Collection[str], default: str | None = None) -> None:
    """--rows (of these; `default`: all), --json, --same-process, and the --child of `row_in_child`."""
    names = ", ".join(rows)
    parser.add_argument("--rows", default=default or ",".join(rows), help=f"with commas, of: {names}")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--same-process", action="store_true", help="do not start a process for each row")
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


def print_rows(
    script: str,
    argv: Sequence[str],
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, str], dict[str, Any]],
    table: Callable[[Sequence[dict[str, Any]]], list[str]],
    about: dict[str, Any] | None = None,
) -> None:
    """Measure the rows of `args` by `measure`, each in a process of its own (as such a process: print the one row), and
    print `table` of all. --json is written after every row, with `conditions` and `about`; a row's last line of the
    table goes to stderr as soon as it is there."""
    if args.child:
        print("\n" + json.dumps(measure(args, args.rows[0])))
        return
    results: list[dict[str, Any]] = []
    for row in args.rows:
        results.append(measure(args, row) if args.same_process else row_in_child(script, argv, row))
        print(table(results)[-1], file=sys.stderr, flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({**conditions(), "rows": results, **(about or {})}, indent=1) + "\n")
    print("\n".join(table(results)))


def conditions() -> dict[str, Any]:
    """What belongs to every figure: device, version of torch, date."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
