"""Which decoder layers live in host memory, and what that leaves on the device. Pure arithmetic.

Offloaded layers are copied into two buffers in turn, each as large as the largest of them, so that one is filled while
the other is computed with. They are spread evenly over the model, so that copies and computation overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUFFERS = 2


@dataclass(frozen=True)
class OffloadUnit:
    """The linears of one decoder layer: `nbytes` that they keep, `step_bytes` of these that a step of one sequence
    reads (fewer in a mixture of experts)."""

    name: str
    nbytes: int
    step_bytes: int


@dataclass(frozen=True)
class Offload:
    """`units` are indices of offloaded layers, ascending; `nbytes` what they keep in host memory, `step_bytes` what a
    step of one sequence copies, `buffers` what the copies need on the device."""

    units: tuple[int, ...] = ()
    nbytes: int = 0
    step_bytes: int = 0
    buffers: int = 0

    @property
    def saved(self) -> int:
        """Device memory that becomes free; below zero where the buffers take more than the layers did."""
        return self.nbytes - self.buffers


def spread(count: int, chosen: int) -> tuple[int, ...]:
    """`chosen` of `count` indices, as far apart as can be."""
    return tuple(i * count // chosen for i in range(chosen))


def offload_layers(units: Sequence[OffloadUnit], chosen: int) -> Offload:
    """Offload so many layers."""
    picked = spread(len(units), chosen)
    own = [units[i] for i in picked]
    return Offload(
        picked,
        sum(unit.nbytes for unit in own),
        sum(unit.step_bytes for unit in own),
        BUFFERS * max((unit.nbytes for unit in own), default=0),
    )


def offload_bytes(units: Sequence[OffloadUnit], asked: int) -> Offload:
    """The fewest layers that hold `asked` bytes; all of them when that is more than they hold."""
    for chosen in range(len(units) + 1):
        found = offload_layers(units, chosen)
        if found.nbytes >= asked:
            break
    return found
