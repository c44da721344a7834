"""Logits that wait on disk for the second model, where both models don't fit into memory at once."""

from __future__ import annotations

import shutil
import tempfile
from types import TracebackType
from typing import Self

import numpy as np
import torch

from qengine.errors import CapacityError
from qengine.runtime.report import gib


class LogitFile:
    """float32 rows, written once from start to end, then read once in the same order. Gone when the block ends."""

    def __init__(self, vocab: int, rows: int) -> None:
        """Raises CapacityError when the temporary folder hasn't room for rows * vocab floats."""
        folder = tempfile.gettempdir()
        need, free = 4 * vocab * rows, shutil.disk_usage(folder).free
        if need > free:
            raise CapacityError(
                f"the logits of {rows} positions don't fit into {folder}",
                have=gib(free), need=gib(need), hint="a smaller --max-tokens, or TMPDIR on a larger disk",
            )  # fmt: skip
        self.vocab = vocab
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by our own block)
        self._reading = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, logits: torch.Tensor) -> None:
        """logits float32 [R, vocab]."""
        self._file.write(logits.cpu().contiguous().numpy().data)

    def read(self, rows: int) -> torch.Tensor:
        """The next `rows` rows."""
        if not self._reading:
            self._file.seek(0)
            self._reading = True
        data = self._file.read(4 * self.vocab * rows)
        return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.float32).reshape(rows, self.vocab))
