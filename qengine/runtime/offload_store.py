"""Moves loaded layers to host memory, and their tensors' addresses to the buffers they will be copied into.

Formats are not known here: a layer's bytes are what its linears list in `LinearOp.buffers` and `ExpertsOp.buffers`. A
layer is bound on the device like any other, one module at a time, and leaves it when its last module is there; so
loading needs the room of one layer, where two buffers will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from qengine.core.offload import ALIGNMENT, buffer_sizes
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.layers.moe import ExpertLinear
from qengine.plugin import ExpertsOp
from qengine.runtime.expert_slots import SlotLayers, SlotPools
from qengine.runtime.pinned import PinnedMemory
from qengine.runtime.weight_stream import Lane, WeightStream


@dataclass
class StoredLayer:
    """One layer in host memory; `tensors` with the byte where each begins."""

    memory: PinnedMemory
    tensors: list[tuple[torch.Tensor, int]]

    def move_to(self, room: torch.Tensor) -> None:
        """Let all tensors be views of `room` (uint8), with the same offsets as in host memory."""
        for t, at in self.tensors:
            t.data = view_at(room, at, t)


def view_at(room: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the dtype, shape and strides of `like` whose first element lies at byte `at` of `room`."""
    first = (room.storage_offset() + at) // like.element_size()
    empty = torch.empty(0, dtype=like.dtype, device=room.device)
    return empty.set_(room.untyped_storage(), first, like.size(), like.stride())


class OffloadStore:
    """`layers`: the linears of each layer that is to live in host memory, in the order in which they run. With
    `slots` all of them are experts, and so many of each layer have room on the device."""

    def __init__(self, layers: Sequence[Sequence[Linear]], device: torch.device, slots: int = 0) -> None:
        self.layers = [list(leaves) for leaves in layers]
        self.device = device
        self.notes: list[str] = []
        self.stored: list[StoredLayer | None] = [None] * len(self.layers)
        self._home = {id(leaf): i for i, leaves in enumerate(self.layers) for leaf in leaves}
        self._left = [len(leaves) for leaves in self.layers]
        apart = [name for leaves in self.layers for name in _run_apart(leaves)]
        if apart:
            self.notes.append(
                f"experts of {len(apart)} linears run one after the other, because their format's grouped operation "
                f"can't be moved to host memory (first: {apart[0]})"
            )
        self.pools = SlotPools(self.layers, slots, device) if slots else None
        self.slots: SlotLayers | None = None
        """Set by `stream`, where experts have slots."""

    def position(self, leaf: Leaf) -> int | None:
        """The number of the layer that a leaf belongs to; None: it stays on the device."""
        return self._home.get(id(leaf))

    def loaded(self, leaf: Leaf) -> None:
        """Called after each leaf has been loaded: the last one of a layer takes the layer to host memory."""
        layer = self.position(leaf)
        if layer is None:
            return
        self._left[layer] -= 1
        if self._left[layer] == 0:
            if self.pools is not None:
                self.pools.open(layer, self.layers[layer])
            self.stored[layer] = pack(self.layers[layer], self.device)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory, all pinned on a GPU's host."""
        return sum(stored.memory.bytes.numel() for stored in self._all())

    def _all(self) -> Iterator[StoredLayer]:
        for stored in self.stored:
            assert stored is not None, "every leaf of a layer is loaded"
            yield stored

    def stream(self, lane: Lane, hooked: Sequence[Sequence[Linear]]) -> WeightStream:
        """Take the buffers, move all tensors there, fill them with the first layers. `hooked[i]` are the linears before
        which layer i's weights must be there: all linears of its decoder layer."""
        stored = list(self._all())
        sizes = buffer_sizes([s.memory.bytes.numel() for s in stored])
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        for i, s in enumerate(stored):
            s.move_to(buffers[i % len(buffers)])
        made = WeightStream([s.memory for s in stored], buffers, lane)
        for i, leaves in enumerate(hooked):
            for leaf in leaves:
                leaf.before = _entering(made, i)
        if self.pools is not None:
            self._connect(self.pools, made, stored)
        made.finish()
        return made

    def _connect(self, pools: SlotPools, stream: WeightStream, stored: Sequence[StoredLayer]) -> None:
        """Use the slots, once each layer's have been filled and compared with what the stream brings."""
        slots = pools.all()
        if slots is not None:
            slots.connect([(s.memory.bytes, {id(t): at for t, at in s.tensors}) for s in stored])
            try:
                for i in range(len(stored)):
                    stream.enter(i)
                    if not slots.check(i):
                        pools.refuse(f"kernels do not read host memory rightly here (layer {i} of the offloaded ones)")
                        break
            except (RuntimeError, ValueError) as e:
                pools.refuse(f"kernels can't read host memory here ({(str(e).splitlines() or [type(e).__name__])[0]})")
        if pools.refused is None:
            assert slots is not None
            slots.measure()
            slots.reset()
            stream.slots, self.slots = slots.use, slots
            return
        if slots is not None:
            slots.disconnect()
        self.notes.append(f"WARNING: expert slots are not used, every step copies whole layers: {pools.refused}")


def _entering(stream: WeightStream, layer: int) -> Callable[[], None]:
    return lambda: stream.enter(layer)


def _run_apart(leaves: Sequence[Linear]) -> Iterator[str]:
    """Unbundle experts whose grouped op doesn't list its tensors; their names. Before anything is loaded."""
    for leaf in leaves:
        if isinstance(leaf, ExpertLinear) and leaf.index == 0:
            op = leaf.group.op()
            if op is not None and type(op).buffers is ExpertsOp.buffers:
                leaf.group.run_apart()
                yield leaf.name


def pack(leaves: Sequence[Linear], device: torch.device) -> StoredLayer:
    """Copy all that the linears keep into pinned memory of exactly that size; the tensors are views of it then.

    Tensors that share storage (the stacks of a mixture and their experts' views) share it afterwards.
    """
    regions: dict[int, tuple[int, int]] = {}  # storage -> first and last byte in use
    tensors = list(_tensors(leaves))
    for t in tensors:
        key, (first, last) = t.untyped_storage().data_ptr(), _span(t)
        low, high = regions.get(key, (first, last))
        regions[key] = min(low, first), max(high, last)
    place: dict[int, int] = {}  # storage -> where its byte 0 would lie
    total = 0
    for key, (low, high) in regions.items():
        low -= low % ALIGNMENT
        place[key] = total - low
        total += -(-(high - low) // ALIGNMENT) * ALIGNMENT
    memory = PinnedMemory(total, device)
    stored = StoredLayer(memory, [])
    for t in tensors:
        key, (first, last) = t.untyped_storage().data_ptr(), _span(t)
        if key in regions:
            low, high = regions.pop(key)
            whole = torch.empty(0, dtype=torch.uint8, device=t.device)
            whole.set_(t.untyped_storage(), low, (high - low,), (1,))
            memory.bytes[place[key] + low : place[key] + high].copy_(whole)
        stored.tensors.append((t, place[key] + first))
    stored.move_to(memory.bytes)
    return stored


def _tensors(leaves: Sequence[Linear]) -> Iterator[torch.Tensor]:
    """Every tensor that these linears keep, once; those without elements have no place."""
    seen: set[int] = set()
    groups = {id(leaf.group): leaf.group for leaf in leaves if isinstance(leaf, ExpertLinear)}
    grouped = [op for group in groups.values() if (op := group.op()) is not None]
    for buffers in [*(op.buffers() for op in grouped), *(leaf.buffers() for leaf in leaves)]:
        for t in buffers.values():
            if id(t) not in seen and t.numel():
                seen.add(id(t))
                yield t


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First byte of a strided tensor in its storage, and the one behind its last."""
    first = t.storage_offset() * t.element_size()
    reach = 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(t.size(), t.stride(), strict=True))
    return int(first), int(first) + reach * t.element_size()
