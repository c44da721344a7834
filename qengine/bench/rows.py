"""What scripts share that print a table whose rows are measured in a process each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


def row_in_child(script: str, argv: Sequence[str], row: str) -> dict[str, Any]:
    """The row as `script`, run again with its own `argv` and `--rows row --child`, prints it as JSON in its last line;
    where that fails, {"row", "error"}."""
    command = [sys.executable, script, *argv, "--rows", row, "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"row": row, "error": f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def conditions() -> dict[str, Any]:
    """What belongs to every figure: device, version of torch, date."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
