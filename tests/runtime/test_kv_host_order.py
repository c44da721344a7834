"""The order of copies between pool and host memory, on streams that run as late and as early as events allow.

Everything is given to three streams first and run afterwards, one stream or another ahead of the rest: a copy that only
happens to be in time is too early or too late in one of these orders.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from qengine.core import host_tier
from qengine.runtime import kv_host
from qengine.runtime.kv_host import HostBlocks

WIDTHS, BLOCKS, HOST, STEPS = (8, 16), 10, 7, 8
COMPUTE, OUT, BACK = range(3)
LATER = (torch.index_select, torch.Tensor.copy_, torch.Tensor.index_copy_, torch.Tensor.fill_)


class Event:
    """Counts its records: those given to a stream, and those that a stream has come to."""

    def __init__(self) -> None:
        self.given = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.given += 1
        stream.give(lambda mine=self.given: self._reach(mine))

    def _reach(self, mine: int) -> bool:
        self.reached = max(self.reached, mine)
        return True


class Stream:
    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()

    def give(self, work: Callable[[], bool]) -> None:
        """`work` says whether it could be done."""
        self.queue.append(work)

    def wait_event(self, event: Event) -> None:
        if event.given:  # CUDA: waiting for an event that was never recorded does nothing
            self.give(lambda mine=event.given: event.reached >= mine)

    def run_one(self) -> bool:
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        return True


class World(TorchFunctionMode):
    """Copies that are made inside go to the current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without: int | None) -> None:
        super().__init__()
        self.streams = [Stream() for _ in range(3)]
        self.current = self.streams[COMPUTE]
        self.waits: set[int] = set()
        """Lines of kv_host that wait."""

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            self.current = stream
            yield
            self.current = self.streams[COMPUTE]

        def wait(stream: Stream, event: Event) -> None:
            line = sys._getframe(1).f_lineno
            self.waits.add(line)
            if line != without:
                stream.wait_event(event)

        monkeypatch.setattr(kv_host, "_on", on)
        monkeypatch.setattr(kv_host, "_wait", wait)
        monkeypatch.setattr(kv_host, "_event", lambda device: Event())
        monkeypatch.setattr(kv_host, "_record", lambda stream, event: event.record(stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.streams[COMPUTE])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "non_blocking"}
        if func not in LATER:
            return func(*args, **kwargs)
        self.current.give(lambda: func(*args, **kwargs) is not None)
        return kwargs.get("out", args[0])

    def run(self, prefer: Sequence[int], dice: random.Random | None) -> None:
        """All that was given: always the first stream of `prefer` that can go on, or with `dice` any that can."""
        while any(stream.queue for stream in self.streams):
            order = dice.sample(range(3), 3) if dice is not None else prefer
            assert any(self.streams[i].run_one() for i in order), "every stream waits for another"


def story(world: World, kind: type[HostBlocks], seed: int) -> list[Callable[[], bool]]:
    """Some steps in which blocks go out, are overwritten, come back and are read. Checks, to be asked at the end, say
    whether each step read what it should have."""
    dice = random.Random(seed)
    storage = [torch.randint(0, 256, (BLOCKS, w), dtype=torch.uint8) for w in WIDTHS]
    truth = [t.clone() for t in storage]
    kept: dict[int, list[torch.Tensor]] = {}
    checks: list[Callable[[], bool]] = []
    host, streams = kind(storage, HOST), world.streams
    host._out_stream, host._back_stream = streams[OUT], streams[BACK]  # type: ignore[assignment]
    with world:
        for step in range(STEPS):
            blocks = dice.sample(range(BLOCKS), 5)
            out = list(zip(blocks, dice.sample(range(1, HOST + 1), dice.choice((0, 2, 5))), strict=False))
            kept |= {there: [t[block].clone() for t in truth] for block, there in out}
            back = list(zip(dice.sample(sorted(kept), min(len(kept), dice.choice((0, 3, 5)))), blocks, strict=False))
            host.copy_out(out)
            for t, real in zip(storage, truth, strict=True):  # the next owners write
                for block in blocks:
                    t[block].fill_(step)
                    real[block] = step
            host.copy_in(back)
            for there, block in back:
                for t, was in zip(truth, kept[there], strict=True):
                    t[block] = was
            now = [t.clone() for t in truth]
            seen: list[bool] = []

            def read(now: list[torch.Tensor] = now, seen: list[bool] = seen) -> bool:
                seen.append(all(torch.equal(t, was) for t, was in zip(storage, now, strict=True)))
                return True

            world.streams[COMPUTE].give(read)
            checks.append(lambda seen=seen: seen == [True])
    return checks


ORDERS: list[tuple[Sequence[int], int | None]] = [
    *((order, None) for order in itertools.permutations(range(3))), *(((), seed) for seed in range(6)),
]  # fmt: skip


def right(
    monkeypatch: pytest.MonkeyPatch, kind: type[HostBlocks] = HostBlocks, without: int | None = None
) -> tuple[bool, set[int]]:
    """Whether all orders give every step what it should read; and the lines that wait."""
    lines: set[int] = set()
    for order, seed in ORDERS:
        with monkeypatch.context() as patch:
            patch.setattr(host_tier, "STAGE_BYTES", 2 * sum(WIDTHS))  # three buffers full in the largest copies
            world = World(patch, without)
            checks = story(world, kind, 5)
            world.run(order, None if seed is None else random.Random(seed))
            lines |= world.waits
            if not all(check() for check in checks):
                return False, lines
    return True, lines


def test_copies_are_in_order_and_no_wait_is_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    good, lines = right(monkeypatch)
    assert good and len(lines) == 5
    unneeded = [line for line in lines if right(monkeypatch, without=line)[0]]
    assert unneeded == [], "control: without any one of the waits some order reads wrong bytes"


def test_a_block_that_comes_back_at_once_waits_for_the_newest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(HostBlocks):
        """Control: takes every copy out for an older one."""

        def copy_out(self, pairs: kv_host.Pairs) -> None:
            super().copy_out(pairs)
            self._fresh = set()

    assert not right(monkeypatch, Forgetful)[0]
