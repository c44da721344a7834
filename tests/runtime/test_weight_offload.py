"""Layers in host memory: the order of copies and waits on lanes that do the worst that is allowed, and the same bits as
without offload in every format, on GPU operations that run in the interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from offloaded_models import CPU, MODELS, AtItsWorst, AtOnce, NeverWaiting, loaded
from qengine.core.offload import (
    OffloadUnit,
    buffer_sizes,
    choices,
    copied_bytes,
    gib_for,
    offload_bytes,
    offload_layers,
)
from qengine.errors import ConfigError
from qengine.layers.moe import ExpertLinear
from qengine.models.model import Model
from qengine.plugin import ExpertsOp
from qengine.runtime.offload_units import offload_units
from qengine.runtime.pinned import PinnedMemory
from qengine.runtime.weight_stream import Lane, WeightStream
from qengine_dense.experts import DenseCudaExperts
from torch_kv import PagedRun

GIB = 2**30


LANES = [AtOnce, AtItsWorst]


def numbered(count: int, lane: Lane) -> WeightStream:
    """Layer i is a byte i + 1."""
    sources = [PinnedMemory(1, CPU) for _ in range(count)]
    for i, source in enumerate(sources):
        source.bytes.fill_(i + 1)
    return WeightStream(sources, [torch.zeros(n, dtype=torch.uint8) for n in buffer_sizes([1] * count)], lane)


def check(stream: WeightStream, layer: int) -> bool:
    stream.enter(layer)
    return int(stream.buffers[layer % len(stream.buffers)]) == layer + 1


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("count", range(1, 7))
def test_every_layer_is_there_when_it_is_entered(count: int, lane: type[AtOnce]) -> None:
    stream = numbered(count, lane())
    shuffled = random.Random(count)
    for turn in range(12):
        order = [i for i in range(count) for _ in range(2)]  # several linears of a layer
        if turn >= 6:  # a model that leaves layers out, comes back, or stops in the middle of a pass
            order = shuffled.choices(range(count), k=5)
        assert all(check(stream, i) for i in order)
        if turn != 8:
            stream.finish()
            assert not getattr(stream.lane, "due", None), "nothing is under way between passes"
        if turn == 9:
            stream.restart()
    assert count < 3 or not all(check(numbered(count, NeverWaiting()), i) for i in range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_a_pass_copies_each_layer_once_and_ahead(count: int) -> None:
    lane = AtOnce()
    stream = numbered(count, lane)
    stream.finish()
    lane.copies.clear()
    for _ in range(3):
        for i in range(count):
            before = len(lane.copies)
            stream.enter(i)
            other = 1 - i % 2
            due = i > 0 and len(range(other, count, 2)) > 1
            assert lane.copies[before:] == ([other] if due else []), "as soon as that buffer is free"
        stream.finish()
    assert len(lane.copies) == 3 * copied_bytes([1] * count)
    assert [copied_bytes([1] * n) for n in range(6)] == [0, 0, 0, 2, 4, 5]


def test_numbers_for_the_flag() -> None:
    sizes = [400_000_000] * 31 + [450_000_000]
    units = [OffloadUnit(str(i), size) for i, size in enumerate(sizes)]
    for choice in choices(units):
        assert offload_bytes(units, int(gib_for(units, choice) * GIB)) == choice
    assert offload_bytes(units, 0).units == () and offload_bytes(units, 10**15).nbytes == sum(sizes)
    one, two, three = (offload_layers(units, n) for n in (1, 2, 3))
    assert (one.saved, two.saved, three.saved) == (0, 0, 400_000_000), "the first two have a buffer each"
    assert (two.step_bytes, three.step_bytes) == (0, 800_000_000)


# Whole models

def logits(model: Model) -> torch.Tensor:
    with torch.inference_mode():
        return PagedRun(model, [[7]]).run()[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_without_offload(name: str, tmp_path: Path) -> None:
    want = logits(loaded(tmp_path, name, None)[0])
    assert torch.isfinite(want).all() and want.std() > 1e-3
    model, _ = loaded(tmp_path, name, AtItsWorst())
    assert torch.equal(logits(model), want)
    if name == "16-bit":
        assert all(torch.equal(logits(model), want) for _ in range(4))
        assert not torch.equal(logits(loaded(tmp_path, name, NeverWaiting())[0]), want)


def test_only_what_the_patterns_name(tmp_path: Path) -> None:
    plain, _ = loaded(tmp_path, "16-bit experts", None)
    model, store = loaded(tmp_path, "16-bit experts", AtItsWorst(), "*.experts.1, *.o_proj")
    assert torch.equal(logits(model), logits(plain))
    assert store is not None and len(store.layers) == 3
    for leaves in store.layers:
        experts = [leaf for leaf in leaves if isinstance(leaf, ExpertLinear)]
        assert len(experts) == 8 and len(leaves) == 9, "the experts of a layer go together"
    with pytest.raises(ConfigError, match=r"names no linear of a decoder layer; have: \*\.gate_up; need: .*q_proj"):
        offload_units(plain, "*.o_proj,*.gate_up")


def test_experts_whose_grouped_op_cannot_move_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = logits(loaded(tmp_path, "16-bit experts", None)[0])
    monkeypatch.setattr(DenseCudaExperts, "buffers", ExpertsOp.buffers)
    model, store = loaded(tmp_path, "16-bit experts", AtItsWorst())
    assert store is not None and "experts of 6 linears run one after the other" in store.notes[0]
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
