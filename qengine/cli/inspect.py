"""`qengine inspect`: what a checkpoint holds and how it would run here, from its headers alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from qengine.cli.options import UNITS_NOTE, add_options, config_from, say, take_model
from qengine.config import EngineConfig
from qengine.errors import ConfigError

if TYPE_CHECKING:
    from qengine.runtime.build import Built

NAME = "inspect"
HELP = "Check a checkpoint's tensors and plan its memory, without reading weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qengine inspect MODEL [flags]"
    parser.epilog = UNITS_NOTE
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="Local folder or hub name")
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print formats, bytes, plan, notes and warnings. What makes `serve` refuse the checkpoint is an error here too."""
    take_model(args)
    config = config_from(EngineConfig, args)
    if config.model is None:
        raise ConfigError("inspect needs a model", hint="qengine inspect MODEL")

    from qengine.runtime.build import decide
    from qengine.runtime.hub import resolve_folder

    folder = resolve_folder(config.model, revision=config.revision, say=say)
    for line in describe(decide(dataclasses.replace(config, model=str(folder)))):
        print(line)
    return 0


def describe(b: Built) -> list[str]:
    """The lines that `inspect` prints."""
    from qengine.runtime import report

    memory = b.memory
    formats = Counter(b.load_plan.schemes.values())
    token_bytes = sum(layout.block_bytes for layout in b.layouts) / b.config.block_size
    return [
        f"Model: {b.checkpoint.folder}",
        f"Tensors: {len(b.checkpoint.tensors)} stored, {report.gib(b.checkpoint.nbytes)}; nothing is missing",
        f"Linears: {', '.join(f'{n} x {name}' for name, n in formats.most_common())} ({b.choice.reason})",
        f"Device: {b.info.type} {b.info.name}".rstrip(),
        f"Compute dtype: {str(b.dtype).removeprefix('torch.')} ({b.dtype_reason})",
        "Weights in memory: " + ", ".join(f"{k} {report.gib(v)}" for k, v in b.load_plan.bytes_by_format.items()),
        f"KV cache: {b.kv.name}, {token_bytes:,.0f} bytes for one token",
        *report.scale_lines(b.kv, b.scales.scales),
        "Memory plan: " + "; ".join(f"{what} {report.gib(size)}" for what, size in memory.items()),
        *report.kv_lines(
            memory.kv_tokens, memory.max_model_len, memory.concurrency(memory.max_model_len), b.device.type == "cuda"
        ),
        *b.notes,
        *b.checkpoint.notes,
        *b.load_plan.notes,
        *b.scales.notes,
        *(f"WARNING: {line}" for line in [*b.load_plan.warnings, *b.scales.warnings]),
    ]
