"""What a launcher knows about the chip: the limits that decide tiles, and nothing else.

Configurations are pure functions of shapes and a `Chip`, so that every kernel variant can be listed, cross-compiled
and checked against a chip's shared memory with no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Largest shared memory of one thread block in KiB by compute capability (CUDA programming guide)."""


@dataclass(frozen=True)
class Chip:
    """One GPU as the launchers see it.

    sm              compute capability as one number (75, 90, ...); 0 is Triton's interpreter
    shared_memory   bytes that one thread block may use
    multiprocessors how many programs run side by side at least
    """

    sm: int
    shared_memory: int
    multiprocessors: int

    @property
    def tensor_cores(self) -> bool:
        """Whether `tl.dot` reaches tensor cores: Triton emits plain FMA on sm_75."""
        return self.sm == 0 or self.sm >= 80

    @classmethod
    def known(cls, sm: int, multiprocessors: int = 64) -> Chip:
        """A chip by its compute capability alone; the smallest limit stands in for one not in the table."""
        return cls(sm, SHARED_MEMORY.get(sm, 64) * 1024, multiprocessors)

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        """The chip behind a torch device; a CPU stands for the interpreter."""
        if device.type != "cuda":
            return INTERPRETER
        index = torch.cuda.current_device() if device.index is None else device.index
        return _cuda_chip(index)


INTERPRETER = Chip(sm=0, shared_memory=64 * 1024, multiprocessors=2)


@lru_cache(maxsize=64)
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    chip = Chip.known(properties.major * 10 + properties.minor, properties.multi_processor_count)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return replace(chip, shared_memory=shared) if shared else chip


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(1 << max(n - 1, 0).bit_length(), least)
