"""Which decoder layers live in host memory, and what that leaves on the device. Pure arithmetic.

Offloaded layers are copied into two buffers in turn, so that one is filled while the other is computed with. They are
spread evenly over the model, so that copies and computation overlap. Every step copies all of them, experts included.

With slots on the device for some experts of each layer only experts are offloaded, and a step of few tokens copies
those that it asks for and that have no slot; larger steps copy whole layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GIB = 1 << 30
BUFFERS = 2
ALIGNMENT = 256
"""Bytes. Each tensor of a layer begins at a multiple of it, in host memory and in the buffers."""


@dataclass(frozen=True)
class OffloadUnit:
    """What of one decoder layer may leave the device, and the bytes that it keeps. `experts`, where these are all that
    may leave: how many there are, of which a token takes `top_k`."""

    name: str
    nbytes: int
    experts: int = 0
    top_k: int = 0

    def bytes_of_experts(self, count: int) -> int:
        """What so many of the experts keep, at most all."""
        return self.nbytes * min(count, self.experts) // self.experts if self.experts else 0


@dataclass(frozen=True)
class Offload:
    """`units` are indices of offloaded layers, ascending; `nbytes` what they keep in host memory, `buffers` what the
    copies need on the device, `step_bytes` what each step copies. `slots` is what expert slots take on the device,
    `token_bytes` the experts of one token in all these layers: what a step of one token copies at most with slots."""

    units: tuple[int, ...] = ()
    nbytes: int = 0
    buffers: int = 0
    step_bytes: int = 0
    slots: int = 0
    token_bytes: int = 0

    @property
    def saved(self) -> int:
        """Device memory that becomes free: nothing for the first two layers, which have a buffer each."""
        return self.nbytes - self.buffers - self.slots


def spread(count: int, chosen: int) -> tuple[int, ...]:
    """`chosen` of `count` indices, as far apart as can be."""
    return tuple(i * count // chosen for i in range(chosen))


def by_buffer(sizes: Sequence[int]) -> list[Sequence[int]]:
    """Of offloaded layers of these bytes, in order, those that go to each buffer: layer i to buffer i % BUFFERS."""
    return [sizes[i::BUFFERS] for i in range(min(BUFFERS, len(sizes)))]


def buffer_sizes(sizes: Sequence[int]) -> list[int]:
    """Bytes of each buffer."""
    return [max(own) for own in by_buffer(sizes)]


def copied_bytes(sizes: Sequence[int]) -> int:
    """What each step copies of such layers: one that has a buffer of its own stays there."""
    return sum(sum(own) for own in by_buffer(sizes) if len(own) > 1)


def offload_layers(units: Sequence[OffloadUnit], chosen: int, slots: int = 0) -> Offload:
    """Offload so many layers, with so many expert slots for each."""
    picked = spread(len(units), chosen)
    sizes = [units[i].nbytes for i in picked]
    held = sum(units[i].bytes_of_experts(slots) for i in picked)
    token = sum(units[i].bytes_of_experts(units[i].top_k) for i in picked)
    return Offload(picked, sum(sizes), sum(buffer_sizes(sizes)), copied_bytes(sizes), held, token if slots else 0)


def choices(units: Sequence[OffloadUnit], slots: int = 0) -> Iterator[Offload]:
    """What can be asked for by a number of bytes: one layer or more, each choice with more bytes than those before."""
    most = 0
    for chosen in range(1, len(units) + 1):
        found = offload_layers(units, chosen, slots)
        if found.nbytes > most:
            most = found.nbytes
            yield found


def offload_bytes(units: Sequence[OffloadUnit], asked: int, slots: int = 0) -> Offload:
    """The fewest layers that hold `asked` bytes; as much as can be when that is more than they hold."""
    found = Offload()
    for choice in choices(units, slots) if asked > 0 else ():
        found = choice
        if found.nbytes >= asked:
            break
    return found


def bytes_of(gib: float) -> int:
    """--cpu-offload-gb in bytes."""
    return int(gib * GIB)


def gib_for(units: Sequence[OffloadUnit], offload: Offload) -> float:
    """A short number for --cpu-offload-gb that gives this choice of layers."""
    for digits in range(2, 10):
        scale: int = 10**digits
        gib = offload.nbytes * scale // GIB / scale
        if bytes_of(gib) > 0 and offload_bytes(units, bytes_of(gib)).units == offload.units:
            return gib
    return offload.nbytes / GIB
