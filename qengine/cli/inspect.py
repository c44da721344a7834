"""`qengine inspect`: what a checkpoint holds and how it would run, from its headers alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from qengine.cli.options import UNITS_NOTE, add_options, config_from, say, take_model
from qengine.config import EngineConfig
from qengine.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from qengine.runtime.device_matrix import Answer
    from qengine.runtime.inspection import Inspection

NAME = "inspect"
HELP = "Check a checkpoint's tensors and plan its memory, without reading weights"
NOT_SERVABLE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qengine inspect MODEL [flags]"
    parser.epilog = (
        "Exit code 1: `qengine serve` with these flags would refuse the checkpoint or this machine. " + UNITS_NOTE
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="Local folder, hub name or demo")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text")
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print what the headers tell. 1 when the model could not be served."""
    take_model(args)
    config = config_from(EngineConfig, args)
    if config.model is None:
        raise ConfigError("inspect needs a model", hint="qengine inspect MODEL")
    if config.load_format == "dummy":
        raise ConfigError("inspect reads a checkpoint's headers, and --load-format dummy has none")

    from qengine.runtime.hub import resolve_folder
    from qengine.runtime.inspection import as_json, inspect_folder
    from qengine.runtime.pickled import made_before, pickles_count

    folder = resolve_folder(config.model, revision=config.revision, say=say)
    if pickles_count(folder, config.load_format):
        copy = made_before(folder)
        if copy is None:
            raise CheckpointError(
                "inspect reads headers, which pickled weights do not have",
                hint=f"`qengine pull {config.model}` makes the safetensors copy that serving would use",
            )
        folder = copy
    found = inspect_folder(dataclasses.replace(config, model=str(folder)))
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print("\n".join(describe(found)))
    return 0 if found.servable else NOT_SERVABLE


def describe(found: Inspection) -> list[str]:
    """The lines that `inspect` prints."""
    from qengine.runtime import report

    sizes = ", ".join(f"{code} {report.gib(size)}" for code, size in found.file_dtypes.items())
    lines = [f"Model: {found.model}"]
    if found.tensors:
        lines.append(f"Type: {found.model_type}; weights: {found.format or 'unknown'}")
        lines.append(f"Tensors: {found.tensors} in {report.gib(found.file_bytes)} ({sizes})")
    lines += section("Modules", module_lines(found))
    lines += section("Bytes by scheme", byte_lines(found))
    lines += section("Kernels by device: weights", kernel_lines(found.kernels))
    lines += section("Kernels by device: KV cache", kernel_lines(found.kv_kernels))
    lines += section("KV scales", kv_lines(found))
    lines += section("Missing", found.missing)
    lines += section("Wrong shape or dtype", found.wrong)
    lines += section("In the file and not used", found.extra)
    lines += section("Stale files and tensors", found.stale)
    lines += section("Config against tensors", found.contradictions)
    lines += section("Not checked, because it needs data", found.unchecked)
    lines += section("On this machine", found.plan)
    lines += section("Notes", found.notes)
    lines += section("Problems", found.problems)
    if found.servable and found.texts_refused:
        return [*lines, "", "It can be served with another --tokenizer only (see the notes)."]
    if found.servable:
        return [*lines, "", "It can be served" + (", as far as headers tell." if found.unchecked else ".")]
    return [*lines, "", f"It could not be served: {len(found.problems)} problem(s)."]


def section(title: str, lines: Sequence[str], most: int = 40) -> list[str]:
    """A titled block, or nothing; `most` lines and the number of the others."""
    if not lines:
        return []
    rest = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return ["", f"{title}:", *(f"  {line}" for line in lines[:most]), *rest]


def module_lines(found: Inspection) -> list[str]:
    rows = []
    for group in found.modules:
        where = f" (* = {group.numbers})" if group.numbers else ""
        shape = f"{group.in_features} -> {group.out_features}"
        rows.append((group.scheme, f"{group.count} x", group.modules + where, shape))
    return table(rows)


def byte_lines(found: Inspection) -> list[str]:
    from qengine.runtime.report import gib

    if not found.bytes:
        return []
    rows = [(name, gib(s.file), gib(s.gpu), gib(s.cpu)) for name, s in found.bytes.items()]
    total = [sum(getattr(s, kind) for s in found.bytes.values()) for kind in ("file", "gpu", "cpu")]
    return table([("", "file", "GPU", "CPU"), *rows, ("total", *map(gib, total))])


def kernel_lines(answers: dict[str, list[Answer]]) -> list[str]:
    """Neighbouring devices that answer alike in one line."""
    lines = []
    for name, own in answers.items():
        lines.append(name)
        for (dtype, kind, reason), alike in groupby(own, key=lambda a: (a.dtype, a.kind, a.reason)):
            devices = ", ".join(answer.device for answer in alike)
            how = f"{kind}: {reason}" if reason else kind
            lines.append(f"  {devices}{' ' + dtype if dtype else ''}: {how}")
    return lines


def kv_lines(found: Inspection) -> list[str]:
    lines = [f"{source}: {len(layers)} layer(s)" for source, layers in found.kv_scales.items()]
    return lines + found.kv_notes


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns padded to their widest entry."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
