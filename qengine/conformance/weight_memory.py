"""Checks of the bytes that a bound linear keeps: planned, listed, movable, replayable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from qengine.conformance.kit import NotApplicable, Registry, need
from qengine.conformance.weight_numbers import beside, same_bits
from qengine.conformance.weight_subject import WeightSubject, bind, inputs
from qengine.layers.linear import whole
from qengine.plugin import LinearOp, LinearSpec
from qengine.runtime.capture import captured

MEMORY = Registry()
SINGLE_NUMBER = 4
"""Bytes for each shard that need not be planned: a static activation scale, say, which shards may share or not."""
DEEPEST = 6
"""Levels of attributes and containers that are searched for tensors."""


@MEMORY.add("bytes")
def resident_bytes(subject: WeightSubject) -> None:
    """`resident_bytes` is what `bind` keeps, also of fused shards, and `compact` keeps no more.

    An index of the inputs may be planned for and turn out not to be needed; a single number for each shard need not be
    planned.
    """
    for own, place, dtype, _ in subject.runs():
        scheme = own.scheme
        planned, kept = scheme.resident_bytes(own.spec, place.info, dtype), own.bind(place, dtype).nbytes
        where = f"{own} on {place} in {str(dtype).removeprefix('torch.')}"
        _agree(where, planned, kept, own.spec, shards=1)
        smaller = scheme.compact()
        if smaller is not None:
            least = smaller.resident_bytes(own.spec, place.info, dtype)
            need(least <= planned, f"{where}: compact() keeps {least} bytes, more than {planned}")
    for own in subject.stored[:2]:
        pair = beside(own)
        for _, place, dtype, _ in subject.runs([] if pair is None else [own]):
            spec = whole([part.spec for part in pair or ()])
            planned, kept = own.scheme.resident_bytes(spec, place.info, dtype), bind(pair or (), place, dtype).nbytes
            _agree(f"two fused shards of {own} on {place}", planned, kept, spec, shards=2)


def _agree(where: str, planned: int, kept: int, spec: LinearSpec, shards: int) -> None:
    index = 4 * spec.in_features
    agreed = planned == kept + index or kept - planned in range(0, SINGLE_NUMBER * shards + 1, SINGLE_NUMBER)
    need(agreed, f"{where}: resident_bytes says {planned}, the op's buffers hold {kept}")


@MEMORY.add("buffers")
def buffers(subject: WeightSubject) -> None:
    """`buffers` lists every tensor that the op keeps, the very ones and on its device."""
    for own, place, dtype, _ in subject.runs(subject.stored[:3]):
        op = own.bind(place, dtype)
        listed = list(op.buffers().values())
        known = {_address(t) for t in listed}
        hidden = [t for t in held_tensors(op) if t.numel() and _address(t) not in known]
        sizes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in hidden)
        need(not hidden, f"{own} on {place}: the op keeps tensors that buffers() does not list: {sizes}")
        away = [name for name, t in op.buffers().items() if t.device != place.device]
        need(not away, f"{own} on {place}: {', '.join(away)} lie on another device")


def _address(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else id(t)


def held_tensors(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor within reach of an object's attributes and containers."""
    seen: set[int] = set()
    level = [root]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                yield value
            else:
                inner += _parts(value)
        level = inner


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
        return ()
    own = getattr(value, "__dict__", None)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*(own.values() if isinstance(own, dict) else ()), *(getattr(value, n, None) for n in slots)]


@MEMORY.add("offload")
def offload(subject: WeightSubject) -> None:
    """Buffers moved to the host, to other addresses and back give the same bits; nothing else holds the weight."""
    count = 0
    for own, place, dtype, _ in subject.runs(subject.stored[:3]):
        op = own.bind(place, dtype)
        held = op.buffers()
        if any(t.layout is not torch.strided for t in held.values()):
            continue  # a library's own prepacked layout has no bytes to move
        count += 1
        x = inputs(3, own.spec, dtype, place)
        want = op(x).clone()
        saved = {name: t.detach().to("cpu", copy=True) for name, t in held.items()}
        for t in held.values():
            t.zero_()
        need(not same_bits(op(x), want), f"{own} on {place}: with every buffer zeroed the result is the same: the "
             "weight is kept elsewhere")  # fmt: skip
        _move_back(op, saved)
        need(same_bits(op(x), want), f"{own} on {place}: buffers at another address give other bits (a view or a "
             "copy of one is kept)")  # fmt: skip
    if not count:
        raise NotApplicable("every op here keeps a library's prepacked layout")


def _move_back(op: LinearOp, saved: dict[str, torch.Tensor]) -> None:
    """Give every buffer new memory with its old contents; the old memory holds ones."""
    for name, t in op.buffers().items():
        old = t.detach()
        t.data = saved[name].to(t.device, copy=True)
        old.fill_(1)


@MEMORY.add("graphs", gpu=True)
def graphs(subject: WeightSubject) -> None:
    """Captured in a CUDA graph and replayed with other inputs, the op gives the bits of a plain call."""
    for own, place, dtype, _ in subject.runs(subject.stored[:3]):
        if place.device.type != "cuda":
            continue
        op = own.bind(place, dtype)
        for m in (1, 8):
            static = inputs(m, own.spec, dtype, place)
            out = [op(static)]
            graph = captured(partial(_append, out, op, static), torch.cuda.graph_pool_handle())
            for seed in (5, 6):
                x = inputs(m, own.spec, dtype, place, seed)
                static.copy_(x)
                graph.replay()
                torch.cuda.synchronize()
                need(same_bits(out[-1], op(x)), f"{own} on {place}: {m} rows, replayed, differ from a plain call")


def _append(out: list[torch.Tensor], op: LinearOp, x: torch.Tensor) -> None:
    out.append(op(x))
