"""Copies offloaded layers to the device ahead of use: two buffers in turn, on a stream of their own.

Layer i of the offloaded ones always goes to buffer i % 2, so addresses never change and copies can be captured in CUDA
graphs. Whoever computes calls `enter(i)` before a layer's weights are read (`qengine.layers.linear.Linear.before`):
that waits for the layer's copy and starts the next one, into the buffer of the layer before. `finish` ends a forward
pass: then both buffers hold what the next pass begins with, and nothing is under way, so that passes may be captured,
replayed and run eagerly in any order.

Where experts have slots of their own (`qengine.runtime.expert_slots`), a pass of few tokens copies no layer: it says
how many it has with `begin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from qengine.core.offload import BUFFERS
from qengine.layers.expert_slots import SlotUse
from qengine.runtime.pinned import PinnedMemory


class Lane(Protocol):
    """What copies beside the computation; one event for each buffer."""

    def copy(self, buffer: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying, after all that has been started so far on the computing stream."""
        ...

    def wait(self, buffer: int) -> None:
        """What is started from now on runs after the last copy into this buffer."""
        ...


class CudaLane:
    """A stream for copies. Inside a captured graph its copies become part of the graph."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.ready = [torch.cuda.Event() for _ in range(BUFFERS)]

    def copy(self, buffer: int, to: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(to.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            self.ready[buffer].record()

    def wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(self.ready[buffer])


class WeightStream:
    """`sources[i]`: offloaded layer i in host memory; `buffers` uint8 on the device, each as large as the largest layer
    that goes there. Not thread-safe: one engine loop drives it."""

    def __init__(self, sources: Sequence[PinnedMemory], buffers: Sequence[torch.Tensor], lane: Lane) -> None:
        self.sources, self.buffers, self.lane = list(sources), list(buffers), lane
        self._held: list[int | None] = [None] * len(self.buffers)
        """The layer in each buffer, or on its way there."""
        self._under_way: set[int] = set()
        """Buffers whose copy nobody has waited for."""
        self._current: int | None = None
        self.slots: SlotUse | None = None
        """Set where all that is offloaded has slots."""

    def begin(self, tokens: int) -> None:
        """A forward pass of so many tokens begins; without this word it copies whole layers."""
        if self.slots is not None:
            self.slots.on = tokens <= self.slots.most_tokens

    def enter(self, layer: int) -> None:
        """Offloaded layer number `layer` is computed from here on, and the one before it no longer."""
        if layer == self._current or (self.slots is not None and self.slots.on):
            return
        self._current = layer
        self._fetch(layer)
        self._wait(layer % BUFFERS)
        self._fetch(self._following(layer))

    def finish(self) -> None:
        """The forward pass is over; the next one starts with the first layers in their buffers."""
        self._current = None
        if self.slots is not None:
            self.slots.on = False
        for layer in range(len(self.buffers)):
            self._fetch(layer)
        for buffer in range(len(self.buffers)):
            self._wait(buffer)

    def restart(self) -> None:
        """A pass has ended somewhere: trust nothing that buffers hold, as copies may never have run (a failed capture),
        and fetch the first layers, which passes that were captured before count on."""
        self._held = [None] * len(self.buffers)
        self._under_way.clear()
        self.finish()

    def _following(self, layer: int) -> int:
        """The next layer, in the order of passes, that goes to the other buffer."""
        following = (layer + 1) % len(self.sources)
        if following % BUFFERS == layer % BUFFERS:  # the last of an odd number: the first one has the same buffer
            following = (following + 1) % len(self.sources)
        return following

    def _fetch(self, layer: int) -> None:
        buffer = layer % BUFFERS
        if self._held[buffer] == layer:
            return
        source = self.sources[layer].bytes
        self.lane.copy(buffer, self.buffers[buffer][: source.numel()], source)
        self._held[buffer] = layer
        self._under_way.add(buffer)

    def _wait(self, buffer: int) -> None:
        if buffer in self._under_way:
            self._under_way.remove(buffer)
            self.lane.wait(buffer)
