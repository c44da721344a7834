"""`qengine doctor`: what this machine has, what runs on it, and whether its kernels compute rightly."""

from __future__ import annotations

import argparse
import json

from qengine.cli.options import add_options, say
from qengine.config import EngineConfig

NAME = "doctor"
HELP = "Look at this machine: versions, memory, which formats run and how, and test every kernel"
UNHEALTHY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit code 1: a kernel computes wrongly here. For bug reports: `qengine doctor --json`."
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="Leave out the kernel test and the bandwidths")
    add_options(parser, EngineConfig, only=("device",))


def run(args: argparse.Namespace) -> int:
    """Print what was found. 1 when a kernel is wrong."""
    from qengine.doctor.report import examine, show

    device = getattr(args, "device", EngineConfig.device)
    report = examine(device, quick=args.quick, say=say)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    return 0 if report.healthy else UNHEALTHY
