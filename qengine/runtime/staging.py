"""The numbers of one step on their way to the device: packed into one buffer on the host, sent in one copy.

On CUDA the host's buffers are pinned, so that the copy waits for nothing. There are two of them, used in turns,
because the copy of one step may still be to come while the next one is built. On a CPU the buffer on the host is the
one that is computed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qengine.runtime.marker import mark, wait

ALIGN = 64
"""Bytes at which every part begins: kernels are compiled for aligned addresses, and no step may need another one."""
START = 1 << 16
TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float64): torch.float64}


@dataclass(frozen=True)
class Part:
    """One array of a step."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = int(self.dtype.itemsize)
        for n in self.shape:
            size *= n
        return size


def int64(name: str, *shape: int) -> Part:
    return Part(name, np.dtype(np.int64), shape)


def int32(name: str, *shape: int) -> Part:
    return Part(name, np.dtype(np.int32), shape)


def float64(name: str, *shape: int) -> Part:
    return Part(name, np.dtype(np.float64), shape)


def offsets(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Where each part begins, in bytes, and the size of all."""
    at, out = 0, []
    for part in parts:
        out.append(at)
        at += -(-part.nbytes // ALIGN) * ALIGN
    return out, at


def view_of(buffer: torch.Tensor, at: int, part: Part) -> torch.Tensor:
    """The tensor of one part in a uint8 buffer."""
    return buffer[at : at + part.nbytes].view(TORCH[part.dtype]).view(part.shape)


class Staging:
    """`lay_out` gives the arrays to fill, `send` the same as tensors on the device, valid until the step after next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._host = [self._new_host(START) for _ in range(2)]
        self._there = torch.empty(START, dtype=torch.uint8, device=device) if self._pinned else self._host[0]
        self._copied = [mark(device), mark(device)]
        self._turn = 0
        self._parts: Sequence[Part] = ()
        self._at: list[int] = []
        self._size = 0

    def _new_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def lay_out(self, parts: Sequence[Part]) -> Mapping[str, np.ndarray]:
        self._turn ^= 1
        self._parts = parts
        self._at, self._size = offsets(parts)
        wait(self._copied[self._turn])
        if self._size > len(self._host[self._turn]):
            self._host[self._turn] = self._new_host(1 << (self._size - 1).bit_length())
        memory = self._host[self._turn].numpy()
        return {
            part.name: memory[at : at + part.nbytes].view(part.dtype).reshape(part.shape)
            for part, at in zip(parts, self._at, strict=True)
        }

    def send(self) -> Mapping[str, torch.Tensor]:
        host = self._host[self._turn]
        if self._pinned:
            if self._size > len(self._there):
                self._there = torch.empty(len(host), dtype=torch.uint8, device=self.device)
            self._there[: self._size].copy_(host[: self._size], non_blocking=True)
            self._copied[self._turn] = mark(self.device)
        else:
            self._there = host
        return {part.name: view_of(self._there, at, part) for part, at in zip(self._parts, self._at, strict=True)}

    def head(self, nbytes: int) -> torch.Tensor:
        """The first bytes of what was sent last, on the device."""
        return self._there[:nbytes]
