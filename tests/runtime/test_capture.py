"""What a failed capture of a CUDA graph leaves behind: nothing. And pinned memory, which outlives copies."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qengine.errors import CapacityError
from qengine.layers.batch import Batch
from qengine.models.blocks import Decoder
from qengine.runtime import capture, graphs
from qengine.runtime.capture import captured, reason
from qengine.runtime.pinned import PinnedMemory
from qengine.runtime.report import graph_memory_line
from qengine.runtime.weight_stream import WeightStream
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

POOL: Any = (0, 7)
MIB = 1 << 20


class Device:
    """torch.cuda as far as a capture goes. A pass that waits raises in the debug mode; in a capture it ends that,
    whose end then raises too, with the stream of the capture current."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mode = self.captures = 0
        self.stream = "main"
        self.capturing = self.broken = False
        self.generators = True
        """Whether random numbers can be drawn outside of a capture."""
        self.recording: list[Any] = []
        """Pools that the allocator takes memory of a capture from."""
        cuda = torch.cuda
        patch.setattr(cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", 2 if mode == "error" else mode))
        patch.setattr(cuda, "synchronize", lambda device=None: None)
        patch.setattr(cuda, "current_stream", lambda: self.stream)
        patch.setattr(cuda, "current_device", lambda: 0)
        patch.setattr(cuda, "CUDAGraph", lambda: SimpleNamespace(kind="graph"))
        patch.setattr(cuda, "stream", self._on)
        patch.setattr(cuda, "graph", self._graph)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)
        patch.setattr(capture, "_capture_little", lambda: setattr(self, "generators", True))

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def _graph(self, graph: Any, pool: Any) -> contextlib.AbstractContextManager[None]:
        device = self

        class Capture:
            def __enter__(self) -> None:
                device.captures += 1
                device.stream, device.capturing, device.broken, device.generators = "capture", True, False, False
                device.recording.append(pool)

            def __exit__(self, *error: object) -> None:
                device.capturing = False
                if device.broken:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                device.recording.remove(pool)
                device.stream, device.generators = "main", True

        return Capture()  # type: ignore[return-value]

    def _end(self, index: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording")
        self.recording.remove(pool)

    def wait(self, seen: bool = True) -> None:
        """An operation that waits; `seen`: by the debug mode."""
        if self.mode == 2 and seen:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing:
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_pass_that_waits_is_found_before_its_capture(device: Device) -> None:
    with pytest.raises(RuntimeError, match="called a synchronizing"):
        captured(device.wait, POOL)
    assert (device.captures, device.mode, device.stream) == (0, 0, "main")


def test_one_that_waits_only_the_first_time_is_captured(device: Device) -> None:
    passes: list[int] = []

    def forward() -> None:
        passes.append(1)
        if len(passes) < 3:
            device.wait()

    assert captured(forward, POOL).kind == "graph"  # type: ignore[attr-defined]
    assert device.captures == 1 and len(passes) == 4 and device.mode == 0


@pytest.mark.parametrize("breaks", [True, False], ids=["in torch", "in python"])
def test_a_failed_capture_leaves_nothing(device: Device, breaks: bool) -> None:
    def forward() -> None:
        if device.capturing and not breaks:
            raise RuntimeError("out of memory")
        device.wait(seen=False)

    with pytest.raises(RuntimeError) as error:
        captured(forward, POOL)
    assert device.captures == 1 and device.stream == "main" and device.recording == [] and device.mode == 0
    assert device.generators
    assert reason(error.value) == ("operation not permitted when stream is capturing" if breaks else "out of memory")


def test_a_model_that_cannot_be_captured_is_said(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    model = SimpleNamespace(hidden_size=8, vocab_size=10, ctx=SimpleNamespace(dtype=torch.float32))
    model.forward = lambda ids, batch: device.wait() or torch.zeros(len(ids), 8)
    restarted: list[int] = []
    weights: Any = SimpleNamespace(begin=lambda n: None, finish=lambda: None, restart=lambda: restarted.append(1))
    found, line = graphs.capture_decodes(model, 4, 64, 1, 16, torch.device("cpu"), weights)  # type: ignore[arg-type]
    assert found is None and restarted == [1]
    assert line == "CUDA graphs: not used, the forward pass cannot be captured (called a synchronizing CUDA operation)"


class AtOnce:
    def copy(self, buffer: int, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def wait(self, buffer: int) -> None:
        pass


def test_graphs_of_before_find_the_first_layers_after_a_pass_that_ended_somewhere() -> None:
    """Replays don't go through `enter`: they count on what a finished pass leaves in the buffers."""
    sources = [PinnedMemory(1, torch.device("cpu")) for _ in range(5)]
    for i, source in enumerate(sources):
        source.bytes.fill_(i)
    stream = WeightStream(sources, [torch.full((1,), 9, dtype=torch.uint8) for _ in range(2)], AtOnce())
    stream.finish()
    for layer in range(4):
        stream.enter(layer)
    assert [int(b) for b in stream.buffers] != [0, 1], "control"
    stream.restart()
    assert [int(b) for b in stream.buffers] == [0, 1]


def test_memory_is_unpinned_when_nothing_copies_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append("register") or 0,
        cudaHostUnregister=lambda address: calls.append("unregister"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    memory = PinnedMemory(5000, torch.device("cuda", 0))
    kept = memory.bytes
    del memory
    gc.collect()
    assert calls == ["register", "synchronize", "unregister"] and kept.fill_(1).sum() == 5000
    runtime.cudaHostRegister = lambda address, nbytes, flags: 2
    with pytest.raises(CapacityError, match=r"cannot be pinned; have: CUDA error 2 for 4\.88 KiB"):
        PinnedMemory(5000, torch.device("cuda", 0))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match=r"cannot be pinned; have: .*Cannot allocate"):
        PinnedMemory(5000, torch.device("cuda", 0))


def refuse(*_: object, **__: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_memory_of_graphs_beside_their_plan() -> None:
    def line(planned: int, taken: int, pools: int) -> str:
        return graph_memory_line(planned * MIB, taken * MIB, pools * MIB, 1000 * MIB)

    assert line(300, 310, 290) == "CUDA graphs: planned 0.29 GiB, taken 0.30 GiB"
    assert line(10, -5, 4).endswith("taken 0.0 MiB")
    assert line(10, 31, 31) == "WARNING: CUDA graphs: planned 10.0 MiB, taken 31.0 MiB"
    assert line(10, -5, 31).startswith("WARNING: ")  # a neighbour gave back more than the graphs took
    assert line(10, 500, 4) == ("WARNING: CUDA graphs: planned 10.0 MiB, taken 0.49 GiB (4.0 MiB by torch, the rest by "
                                "the driver or by other processes)")  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seen", [True, False], ids=["seen before", "in the capture"])
def test_on_a_gpu_a_failed_capture_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """An engine whose passes wait serves without graphs, on the stream that it began with, and gets memory back."""
    stream, plain = torch.cuda.current_stream(), Decoder.forward

    def waiting(self: Decoder, input_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        if seen:
            input_ids.sum().item()
        else:
            torch.cuda.current_stream().synchronize()
        return plain(self, input_ids, batch)

    folder = make_tiny(tmp_path)
    options = {"device": "cuda", "dtype": "half"}
    want = run(toy_engine(folder, enforce_eager=True, **options), [request("a", [1, 2, 3])]).ids
    monkeypatch.setattr(Decoder, "forward", waiting)
    engine = toy_engine(folder, **options)
    assert engine.runner.graphs is None and engine.runner.prompt_graphs is None
    assert any(line.startswith("CUDA graphs: not used") for line in engine.facts.report), engine.facts.report
    assert torch.cuda.current_stream() == stream
    assert run(engine, [request("a", [1, 2, 3])]).ids == want
    assert torch.rand(3, device="cuda").isfinite().all()
    # An allocator that still believes in a capture would not free cached memory for a larger piece.
    free = torch.cuda.mem_get_info()[0]
    pieces = [torch.empty(free // 4, dtype=torch.uint8, device="cuda") for _ in range(3)]
    del pieces
    assert torch.empty(free // 10 * 8, dtype=torch.uint8, device="cuda").numel() > free // 2
    torch.cuda.empty_cache()
