"""`qengine plugins`: what is installed, whether it loads, and why not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from qengine.cli import plugins_check, plugins_new
from qengine.plugin.discovery import GROUPS, PluginRecord, check_plugins, list_plugins

NAME = "plugins"
HELP = "List the installed weight formats and KV-cache dtypes, check one, or begin a new one"

ACTIONS: dict[str, Any] = {"check": plugins_check, "new": plugins_new}
COLUMNS = ("kind", "name", "state", "contract", "distribution", "version", "class")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print every record as JSON")
    parser.add_argument("--verbose", action="store_true", help="Show the whole traceback of what is broken")
    parser.add_argument("--no-load", action="store_true", help="Read metadata only; import no plugin")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions (default: list)")
    for name, action in ACTIONS.items():
        sub = actions.add_parser(name, help=action.HELP, description=action.HELP + ".")
        action.add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """A broken plugin is shown and fails nothing: it matters only to a run that asks for it."""
    if args.action is not None:
        return int(ACTIONS[args.action].run(args))
    records = list_plugins() if args.no_load else check_plugins()
    if args.json:
        print(json.dumps([dataclasses.asdict(r) for r in records], indent=2))
        return 0
    for line in table(records):
        print(line)
    for r in records:
        if r.error:
            print(f"\n{GROUPS[r.kind]} {r.name} ({r.origin}): {r.error}")
            if args.verbose and r.traceback:
                print(r.traceback.rstrip())
    return 0


def table(records: Sequence[PluginRecord]) -> list[str]:
    """Aligned rows under a header, without trailing blanks."""
    rows = [COLUMNS, *(cells(r) for r in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def cells(r: PluginRecord) -> tuple[str, ...]:
    return r.kind, r.name, r.state, r.contract or "-", r.distribution, r.version, r.value
