"""KV blocks in host memory, and their copies from and to the device: raw bytes, whatever format they hold.

A host block holds the bytes of one block id in all storage tensors, one after the other. On CUDA it is page-locked, and
copies go through small buffers on the device: blocks are gathered into one on the stream that computes, so a block is
free for its next owner at once; from there the bytes travel on a stream of their own while the step computes. Back it
goes the same way, on a third stream: what a step needs travels while the step before it still runs. Nothing waits on
the host. On a CPU everything happens at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch

from qengine.core.host_tier import STAGES, stage_rows
from qengine.runtime.pinned import PinnedMemory

UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)
Pairs = Sequence[tuple[int, int]]


class Stage:
    """A buffer [rows, elements of a block] on the device, and when its last use is over."""

    def __init__(self, rows: int, width: int, unit: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(rows, width, dtype=unit, device=device)
        self.done = _event(device)


class HostBlocks:
    """`num_blocks` blocks, with ids from 1 on, for the blocks of `storage` (uint8 [num_blocks, bytes] each)."""

    def __init__(self, storage: Sequence[torch.Tensor], num_blocks: int) -> None:
        device = self.device = storage[0].device
        widths = [t.shape[1] for t in storage]
        unit = next(u for u in UNITS if all(width % u.itemsize == 0 for width in widths))
        self.storage = [t.view(unit) for t in storage]
        self.num_blocks = num_blocks
        self.block_bytes = sum(widths)
        self.nbytes = num_blocks * self.block_bytes
        self._pinned = PinnedMemory(self.nbytes, device)
        self.memory = self._pinned.bytes.view(num_blocks, self.block_bytes).view(unit)
        rows, width = stage_rows(self.block_bytes), self.memory.shape[1]
        self._out = [Stage(rows, width, unit, device) for _ in range(STAGES)]
        self._back = [Stage(rows, width, unit, device) for _ in range(STAGES)]
        on_gpu = device.type == "cuda"
        if on_gpu:  # no copy may outlive the memory
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False
        self._out_stream = torch.cuda.Stream(device) if on_gpu else None
        self._back_stream = torch.cuda.Stream(device) if on_gpu else None
        self._written, self._written_before = (_event(device) for _ in range(2))
        """After the last copies to host memory, and after those before them."""
        self._fresh: set[int] = set()
        """Host blocks of the last copies to host memory."""

    def copy_out(self, pairs: Pairs) -> None:
        """Copy (device block, host block). What this stream does next may overwrite the device blocks. The host blocks
        may have been copied in just before: this stream has waited for that, and the copies to them wait for it."""
        if not pairs:
            return
        self._fresh = {host for _, host in pairs}
        self._written, self._written_before = self._written_before, self._written
        for part in _parts(sorted(pairs, key=lambda pair: pair[1]), len(self._out[0].rows)):
            self._out.append(stage := self._out.pop(0))
            _wait(self._here, stage.done)
            index = self._index([block for block, _ in part])
            for own, t in self._slices(stage.rows[: len(part)]):
                torch.index_select(t, 0, index, out=own)
            gathered = _event(self.device)
            _record(self._here, gathered)
            _wait(self._out_stream, gathered)
            with _on(self._out_stream):
                for row, host, count in _runs([host for _, host in part]):
                    self.memory[host - 1 : host - 1 + count].copy_(stage.rows[row : row + count], non_blocking=True)
            _record(self._out_stream, stage.done)
        _record(self._out_stream, self._written)

    def copy_in(self, pairs: Pairs) -> None:
        """Copy (host block, device block), before anything that this stream does next."""
        if not pairs:
            return
        fresh = any(host in self._fresh for host, _ in pairs)
        _wait(self._back_stream, self._written if fresh else self._written_before)
        for part in _parts(sorted(pairs), len(self._back[0].rows)):
            self._back.append(stage := self._back.pop(0))
            _wait(self._back_stream, stage.done)
            with _on(self._back_stream):
                for row, host, count in _runs([host for host, _ in part]):
                    stage.rows[row : row + count].copy_(self.memory[host - 1 : host - 1 + count], non_blocking=True)
            arrived = _event(self.device)
            _record(self._back_stream, arrived)
            _wait(self._here, arrived)
            index = self._index([block for _, block in part])
            for own, t in self._slices(stage.rows[: len(part)]):
                t.index_copy_(0, index, own)
            _record(self._here, stage.done)

    @property
    def _here(self) -> torch.cuda.Stream | None:
        """The stream that computes."""
        return torch.cuda.current_stream(self.device) if self._out_stream is not None else None

    def _slices(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What belongs to each storage tensor in rows of blocks, and that tensor."""
        at = 0
        for t in self.storage:
            yield rows[:, at : at + t.shape[1]], t
            at += t.shape[1]

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)


def _parts(pairs: Pairs, most: int) -> Iterator[Pairs]:
    for i in range(0, len(pairs), most):
        yield pairs[i : i + most]


def _runs(hosts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, host block, count) of neighbours in ascending `hosts`; the same one may come again."""
    first = 0
    for i in range(1, len(hosts) + 1):
        if i == len(hosts) or hosts[i] != hosts[i - 1] + 1:
            yield first, hosts[first], i - first
            first = i


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type == "cuda" else None


def _record(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        event.record(stream)


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    """Work given to the stream from now on starts behind the event; one that was never recorded holds up nothing."""
    if stream is not None and event is not None:
        stream.wait_event(event)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
