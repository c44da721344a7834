"""What each weight scheme takes in memory beside what it takes in the file, over a folder of checkpoints.

    python benchmarks/checkpoint_bytes.py FOLDER [--device cuda|cpu] [--dtype NAME] [--json PATH]

Every checkpoint in FOLDER is loaded on the device and its buffers are counted; the column of the other kind of device
is the plan, which is asked for without one. Linears of one scheme are added up over all checkpoints. Checkpoints that
are refused are named below the table. On a CPU the first number is with the dense copy that makes large batches fast,
the one in brackets what is kept when memory is short.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qengine.config import EngineConfig
from qengine.errors import UserError
from qengine.runtime.decide import decide
from qengine.runtime.device import select_device
from qengine.runtime.inspection import inspect_folder
from qengine.runtime.loader import load

KV_BYTES = 1 << 24
NOT_LINEAR = ("embedding", "norm")


@dataclass
class Row:
    """Bytes of one scheme over all checkpoints."""

    checkpoints: int = 0
    linears: int = 0
    file: int = 0
    measured: int = 0
    compact: int = 0
    planned: Counter[str] = field(default_factory=Counter)


def add_checkpoint(rows: dict[str, Row], config: EngineConfig) -> str | None:
    """Count one checkpoint; the reason when it is refused."""
    found = inspect_folder(config)
    if not found.servable:
        return found.problems[0]
    try:
        built = decide(config)
        report = load(built.load_plan)
    except UserError as e:
        return str(e)
    for label, sizes in found.bytes.items():
        if label.startswith(NOT_LINEAR):
            continue
        row = rows.setdefault(label, Row())
        row.checkpoints += 1
        row.linears += sum(group.count for group in found.modules if group.scheme == label)
        row.file += sizes.file
        row.measured += report.bytes_by_format.get(label, 0)
        row.planned.update({"gpu": sizes.gpu, "cpu": sizes.cpu})
    for leaf in built.model.linears():
        leaf.compact()
        for label, size in leaf.resident_bytes(built.info).items():
            rows[label].compact += size
    return None


def table(rows: dict[str, Row], device: str) -> list[str]:
    """Markdown, the most compressed scheme first."""
    other = "CPU" if device == "cuda" else "GPU"
    name = {"cuda": "GPU", "cpu": "CPU"}[device]
    lines = [
        f"| scheme | linears | file, KiB | {name}, KiB (measured) | of file | {other}, KiB (planned) | of file |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, row in sorted(rows.items()):
        planned = row.planned[other.lower()]
        short = f" ({row.compact / 1024:,.0f})" if row.compact < 0.99 * row.measured else ""
        share = f" ({row.compact / row.file:.2f})" if short else ""
        lines.append(
            f"| {label} | {row.linears} | {row.file / 1024:,.0f} | {row.measured / 1024:,.0f}{short} | "
            f"{row.measured / row.file:.2f}{share} | {planned / 1024:,.0f} | {planned / row.file:.2f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device, info = select_device(args.device)
    rows: dict[str, Row] = {}
    refused: dict[str, str] = {}
    for folder in sorted(p for p in args.folder.iterdir() if (p / "config.json").is_file()):
        config = EngineConfig(
            model=str(folder), device=device.type, dtype=args.dtype, kv_cache_memory_bytes=KV_BYTES, max_model_len=256,
            lm_head_int8=False,  # a copy beside the weights is no part of the scheme
        )  # fmt: skip
        if reason := add_checkpoint(rows, config):
            refused[folder.name] = reason
    print(f"{info.name or device.type}, torch {torch.__version__}, {datetime.date.today()}\n")
    print("\n".join(table(rows, device.type)))
    for name, reason in refused.items():
        print(f"\nRefused: {name}: {reason}")
    if args.json:
        args.json.write_text(json.dumps(as_json(rows, refused), indent=2) + "\n")
    return 0


def as_json(rows: dict[str, Row], refused: dict[str, str]) -> dict[str, Any]:
    return {"schemes": {label: vars(row) for label, row in rows.items()}, "refused": refused}


if __name__ == "__main__":
    raise SystemExit(main())
