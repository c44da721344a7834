"""What the kernel benchmarks share: options, and how results are written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return args


def header() -> str:
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"device": header(), "rows": rows}, indent=1))
