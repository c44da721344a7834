"""Hidden states between two layers, in a file: what is in memory doesn't grow with the number of samples."""

from __future__ import annotations

from pathlib import Path

import torch


class HiddenFile:
    """float32 [tokens, size] on disk, read and written in pieces. Not mapped: mapped pages would count as resident."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._row = 4 * size

    def write(self, first: int, rows: torch.Tensor) -> None:
        """rows [n, size] become tokens first..first+n-1."""
        with self.path.open("r+b" if self.path.exists() else "w+b") as f:
            f.seek(first * self._row)
            f.write(rows.to("cpu", torch.float32).contiguous().numpy().data)

    def read(self, first: int, count: int) -> torch.Tensor:
        """float32 [count, size] on the CPU."""
        memory = bytearray(count * self._row)
        with self.path.open("rb") as f:
            f.seek(first * self._row)
            if f.readinto(memory) != len(memory):
                raise EOFError(f"{self.path} holds fewer than {first + count} tokens")
        return torch.frombuffer(memory, dtype=torch.float32).view(count, self.size)
