"""The subcommands of `qengine`: finds the one that is asked for, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from qengine import __version__
from qengine.cli import bench, calibrate, doctor, inspect, plan, plugins, pull, serve, tune
from qengine.cli import eval as eval_command
from qengine.cli.options import Parser, as_typed, dashed, refuse_switch_value, refuse_unknown
from qengine.config import EngineConfig
from qengine.errors import UserError
from qengine.plugin.faults import plugin_fault
from qengine.server.config import ServerConfig

COMMANDS = (serve, plan, pull, plugins, inspect, doctor, calibrate, eval_command, bench, tune)
DEBUG_ENV = "QENGINE_DEBUG"
USER_ERROR = 2
PIPE_CLOSED = 141


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole parser, and the subcommands' parsers by name."""
    parser = Parser(prog="qengine", description="A quantisation-first, memory-efficient LLM inference engine")
    parser.add_argument("--version", action="version", version=f"qengine {__version__}")
    _add_debug(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    by_name = {}
    for command in COMMANDS:
        sub = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP + ".")
        command.add_arguments(sub)
        _add_debug(sub)
        sub.set_defaults(run=command.run)
        by_name[command.NAME] = sub
    return parser, by_name


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help=f"Show the traceback of an error ({DEBUG_ENV}=1 does the same)",
    )


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 2: something the user gave cannot work (one line on stderr); 141: the reader of the
    output has gone."""
    argv = dashed(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv or os.environ.get(DEBUG_ENV, "0") not in ("", "0")
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `qengine inspect MODEL | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except UserError as e:
        if debug:
            traceback.print_exc()
        message = as_typed(" ".join(str(e).split()), argv, EngineConfig, ServerConfig)
        print(f"qengine: error: {message}", file=sys.stderr)
        return USER_ERROR
    except Exception as e:
        fault = plugin_fault(e)
        if fault is None or debug:
            raise
        print(f"qengine: error: {fault}", file=sys.stderr)
        return USER_ERROR


def _run(argv: Sequence[str]) -> int:
    parser, by_name = build_parser()
    args, unknown = parser.parse_known_args(argv)
    own = getattr(args, "action_parser", by_name.get(args.command or "", parser))
    refuse_unknown(own, [a for a in unknown if a.startswith("-")])  # whose value has been taken for MODEL
    refuse_switch_value(args)
    refuse_unknown(own, unknown)
    if args.command is None:
        parser.print_help()
        return 0
    return int(args.run(args))
