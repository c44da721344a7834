"""What the kernel benchmarks share: options, and how results are written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from qengine_kernels.timing import conditions


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return args


def header() -> str:
    device, torch_version, triton_version = conditions().values()
    return f"{device}, torch {torch_version}, triton {triton_version}"


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"device": header(), "rows": rows}, indent=1))
