"""`qengine plugins check NAME`: the conformance kit on an installed plugin."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from qengine.errors import ConfigError, PluginError
from qengine.plugin.discovery import PluginRecord, list_plugins, load_kernels, load_plugin

if TYPE_CHECKING:
    from qengine.conformance.kit import Outcome

HELP = "Run the conformance kit on an installed plugin"
SIGNS = {"passed": "ok", "failed": "FAILED", "not applicable": "-"}
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="Name of the plugin, as `qengine plugins` shows it")
    kinds = ("weight", "kv", "kernels")
    parser.add_argument("--kind", choices=kinds, help="Which of several plugins of one name (default: all)")
    parser.add_argument("--gpu", action="store_true", help="Run CUDA code on a GPU instead of Triton's interpreter")
    parser.add_argument("--targets", metavar="SM,SM", help="Chips to compile for, such as 75,90 (default: all claimed)")
    parser.add_argument("--only", metavar="CHECK", action="append", help="Run this check alone; may be given again")
    parser.add_argument("--json", action="store_true", help="Print every outcome as JSON")
    parser.add_argument("--verbose", action="store_true", help="Show the whole traceback of a failure")


def run(args: argparse.Namespace) -> int:
    """0: every check passed or does not apply; 1: some failed."""
    records = [r for r in list_plugins(args.kind) if r.name == args.name]
    if not records:
        names = sorted({r.name for r in list_plugins(args.kind)})
        raise PluginError(f"no plugin named {args.name!r}", need=" | ".join(names))
    targets = read_targets(args.targets)
    outcomes: list[tuple[PluginRecord, Outcome]] = []
    for record in records:
        if not args.json:
            print(f"{record.kind} {record.name} ({record.origin}, {record.value})")
        for outcome in run_record(record, args.gpu, targets, args.only):
            outcomes.append((record, outcome))
            if not args.json:
                print(line(outcome), flush=True)
                if args.verbose and outcome.traceback:
                    print(outcome.traceback.rstrip())
    failed = sum(o.state == "failed" for _, o in outcomes)
    if args.json:
        rows = [{"kind": r.kind, "name": r.name, **dataclasses.asdict(o)} for r, o in outcomes]
        print(json.dumps(rows, indent=2))
    else:
        hint = " (--verbose: tracebacks)" if failed and not args.verbose else ""
        print(f"{len(outcomes)} checks, {failed} failed{hint}")
    return FAILED if failed else 0


def run_record(record: PluginRecord, gpu: bool, targets: list[int] | None, only: list[str] | None) -> Any:
    """Outcomes of one plugin, one by one. Raises PluginError when it does not load, ConfigError for unknown checks."""
    from qengine.conformance.kit import run_checks
    from qengine.conformance.kv_suite import KV_CHECKS
    from qengine.conformance.places import places
    from qengine.conformance.weight_suite import WEIGHT_CHECKS

    where = places(gpu)
    subject, checks = _subject(record, where, targets), KV_CHECKS if record.kind == "kv" else WEIGHT_CHECKS
    unknown = set(only or ()) - {check.name for check in checks}
    if unknown:
        names = " | ".join(check.name for check in checks)
        raise ConfigError(f"--only: no check named {sorted(unknown)[0]!r} for a {record.kind} plugin", need=names)
    return run_checks([c for c in checks if not only or c.name in only], subject, gpu=gpu)


def _subject(record: PluginRecord, where: Any, targets: list[int] | None) -> Any:
    from qengine.conformance.kv_subject import KVSubject
    from qengine.conformance.weight_subject import WeightSubject

    if record.kind == "kv":
        return KVSubject(load_plugin("kv", record.name), where, targets)
    kernels = None
    if record.kind == "kernels":
        good, bad = load_kernels(record.name)
        kernels = next((found for r, found in good if r.value == record.value), None)
        if kernels is None:
            raise PluginError(f"kernels of {record.origin} do not load: {bad[0].error if bad else 'gone'}")
    return WeightSubject(load_plugin("weight", record.name), where, targets=targets, kernels=kernels)


def read_targets(text: str | None) -> list[int] | None:
    from qengine.conformance.compile_job import SHARED_MEMORY

    if text is None:
        return None
    try:
        chosen = [int(part) for part in text.split(",")]
    except ValueError:
        chosen = []
    if not chosen or set(chosen) - SHARED_MEMORY.keys():
        raise ConfigError(f"--targets {text!r}", need=f"some of {','.join(map(str, SHARED_MEMORY))}")
    return chosen


def line(outcome: Outcome) -> str:
    passed = outcome.state == "passed"
    text = "; ".join(t for t in (outcome.what if passed or not outcome.line else "", outcome.line) if t)
    return f"  {SIGNS[outcome.state]:6}  {outcome.name:12}  {text}  ({outcome.seconds:.1f} s)"
