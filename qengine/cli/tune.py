"""`qengine tune`: tiles of 4-bit linears for this GPU."""

from __future__ import annotations

import argparse

from qengine.bench.options import TuneOptions
from qengine.cli.bench import writable
from qengine.cli.options import add_options, config_from, say

NAME = "tune"
HELP = "Measure which tiles 4-bit linears should take on this GPU, for all later starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Whose shapes to measure (default: the demo model's)"
    )
    add_options(parser, TuneOptions)


def run(args: argparse.Namespace) -> int:
    options = config_from(TuneOptions, args)
    writable(options.output)
    from qengine.bench import tiles

    path, found = tiles.measure(args.model, options, say)
    print("\n".join(tiles.lines(path, found)))
    return 0
