"""Gives the experts of offloaded layers slots on the device, or says why they have none.

A layer's slots are made when its experts are all there, before they leave the device: per linear, tensors like the
stacked ones for fewer experts, and the format's operation over them (`ExpertsOp.over`). No format is known here. All
layers have slots or none has: a pass either copies whole layers or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from qengine.core.offload import ALIGNMENT
from qengine.layers.expert_slots import ExpertSlots, SlotUse
from qengine.layers.linear import Linear
from qengine.layers.moe import ExpertGroup, ExpertLinear, SparseMoE
from qengine.plugin import ExpertsOp
from qengine_kernels.expert_slots import Copies, CopyPart, SlotTables, copies_of

COLUMNS = 4
"""Numbers of a layer's counts; one more than there are, so that each row begins at an aligned address."""


REPEATS = 3


class NoSlots(Exception):
    """Why these experts can't have slots."""


@dataclass
class Stack:
    """One stacked tensor of a layer's experts, the same for its slots, and where that begins in the pool."""

    whole: torch.Tensor
    slots: torch.Tensor
    at: int

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return self.whole.nbytes // self.whole.shape[0]


@dataclass
class SlotLayer:
    """Slots of one layer. `ops` run over them: of gate and up, and of down."""

    moe: SparseMoE
    count: int
    pool: torch.Tensor
    stacks: list[Stack] = field(default_factory=list)
    ops: list[ExpertsOp] = field(default_factory=list)

    @classmethod
    def of(cls, leaves: Sequence[Linear], slots: int, device: torch.device) -> SlotLayer:
        """For a complete layer that is on the device. Raises NoSlots."""
        moe, *others = sparse_layers(leaves)
        if others:
            raise NoSlots(f"a decoder layer has several sets of experts (one holds {moe.down.leaves[0].name})")
        count = min(slots, moe.spec.num_experts)
        ops = [operation(group) for group in (moe.gate_up, moe.down)]
        tensors = [_stacked(op, moe.spec.num_experts) for op in ops]
        sizes = [count * t.nbytes // t.shape[0] for own in tensors for t in own.values()]
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        made = cls(moe, count, torch.zeros(sum(steps), dtype=torch.uint8, device=device))
        at = 0
        for op, own in zip(ops, tensors, strict=True):
            stacks = {}
            for name, whole in own.items():
                size = count * whole.nbytes // whole.shape[0]
                stacks[name] = made.pool[at : at + size].view(whole.dtype).view(count, *whole.shape[1:])
                made.stacks.append(Stack(whole, stacks[name], at))
                at += -(-size // ALIGNMENT) * ALIGNMENT
            made.ops.append(_over(op, stacks, count, moe))
        return made

    def fill(self) -> torch.Tensor:
        """Fetch the last experts into empty slots; the slots that they took."""
        assert self.moe.slots is not None
        self.moe.slots.tables.clear()
        experts = self.moe.spec.num_experts
        return self.moe.slots.named(torch.arange(experts - self.count, experts, device=self.pool.device))

    def copies(self, host: torch.Tensor, places: dict[int, int]) -> Copies:
        """From the layer's bytes on the host; `places`: where each tensor begins there, by its id."""
        parts = [CopyPart(places[id(stack.whole)], stack.at, stack.nbytes) for stack in self.stacks]
        return copies_of(parts, host, self.pool)


def sparse_layers(leaves: Sequence[Linear]) -> list[SparseMoE]:
    """The sparse layers whose experts are among these linears."""
    found = {id(leaf.group.layer): leaf.group.layer for leaf in leaves if isinstance(leaf, ExpertLinear)}
    return list(found.values())


def operation(group: ExpertGroup) -> ExpertsOp:
    """The grouped operation of a layer's experts. Raises NoSlots where there is none that could have slots; may be
    asked before anything is loaded."""
    op, name = group.op(), group.leaves[0].name
    if op is None:
        raise NoSlots(f"experts run one after the other (first: {name})")
    if type(op).over is ExpertsOp.over:
        raise NoSlots(f"their format's grouped operation has no slots (first: {name})")
    return op


def _stacked(op: ExpertsOp, experts: int) -> dict[str, torch.Tensor]:
    tensors = {name: t for name, t in op.buffers().items() if t.numel()}
    for name, t in tensors.items():
        if not t.is_contiguous() or t.shape[:1] != (experts,):
            raise NoSlots(f"{name} of their format's grouped operation is not stacked by expert: {list(t.shape)}")
    return tensors


def _over(op: ExpertsOp, stacks: dict[str, torch.Tensor], count: int, moe: SparseMoE) -> ExpertsOp:
    made = op.over(stacks)
    if made is None or min(op.most_pairs, made.most_pairs) < count:
        raise NoSlots(f"experts can't run as one (of {moe.down.leaves[0].name} and its neighbours)")
    return made


class SlotLayers:
    """All layers' slots in use. `counts` int64 [layers, COLUMNS] on the device, see `SlotTables`."""

    def __init__(self, layers: Sequence[SlotLayer], device: torch.device) -> None:
        self.layers = list(layers)
        self.counts = torch.zeros((len(layers), COLUMNS), dtype=torch.int64, device=device)
        self.use = SlotUse(min(layer.count // layer.moe.spec.top_k for layer in layers))
        self.read_rate: float | None = None
        """Bytes a second that kernels read from host memory; None until measured, and on a CPU."""

    def connect(self, hosts: Sequence[tuple[torch.Tensor, dict[int, int]]]) -> None:
        """Let the sparse layers use their slots; `hosts`: each layer's bytes on the host, and where tensors begin."""
        for layer, counts, (host, places) in zip(self.layers, self.counts, hosts, strict=True):
            tables = SlotTables.empty(layer.moe.spec.num_experts, layer.count, counts)
            up, down = layer.ops
            layer.moe.slots = ExpertSlots(up, down, tables, layer.copies(host, places), self.use)

    def disconnect(self) -> None:
        for layer in self.layers:
            layer.moe.slots = None

    def check(self, number: int) -> bool:
        """Fill a layer's slots and compare them with the experts' own tensors, which must be on the device now: whether
        this machine's kernels read host memory as they should."""
        layer = self.layers[number]
        if layer.fill().tolist() != list(range(layer.count)):
            return False
        first = layer.moe.spec.num_experts - layer.count
        return all(torch.equal(_bytes(s.whole[first:]), _bytes(s.slots)) for s in layer.stacks)

    def measure(self) -> None:
        """Fill the first layer's slots anew, a few times, with nothing else on the link: sets `read_rate`."""
        layer = self.layers[0]
        if layer.pool.device.type != "cuda":
            return
        torch.cuda.synchronize(layer.pool.device)
        size = layer.count * sum(stack.nbytes for stack in layer.stacks)
        self.read_rate = max(size / seconds_of(layer.fill) for _ in range(REPEATS))

    def reset(self) -> None:
        """Count anew; the slots keep what they hold."""
        self.counts.zero_()
        for layer in self.layers:
            assert layer.moe.slots is not None
            layer.moe.slots.tables.used.zero_()

    def totals(self) -> torch.Tensor:
        """int64 [COLUMNS] on its way to the host: the sums over all layers."""
        return self.counts.sum(0).to("cpu", non_blocking=True)

    def line(self) -> str:
        """For the start-up report."""
        counts = {f"{layer.count} of {layer.moe.spec.num_experts}" for layer in self.layers}
        size = sum(layer.pool.numel() for layer in self.layers) / 2**30
        return (
            f"Expert slots: {', '.join(sorted(counts))} experts in each of {len(self.layers)} layers ({size:.2f} GiB, "
            f"checked): steps of up to {self.use.most_tokens} tokens copy experts that have no slot, larger ones whole "
            "layers"
        )


def seconds_of(work: Callable[[], object]) -> float:
    """What a CUDA device takes for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end) * 1e-3, 1e-9)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


class SlotPools:
    """Makes the slots of `layers` (the linears of each, all experts) as they are loaded. `refused`: why there are none,
    once that is known, which may be before loading."""

    def __init__(self, layers: Sequence[Sequence[Linear]], slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.refused: str | None = None
        self._made: dict[int, SlotLayer] = {}
        try:
            for group in _groups(layers):
                operation(group)
        except NoSlots as e:
            self.refuse(str(e))

    def refuse(self, reason: str) -> None:
        """No layer has slots."""
        self.refused = reason
        self._made.clear()

    def open(self, number: int, leaves: Sequence[Linear]) -> None:
        """Layer `number` is complete and still on the device."""
        if self.refused is not None:
            return
        try:
            self._made[number] = SlotLayer.of(leaves, self.slots, self.device)
        except NoSlots as e:
            self.refuse(str(e))

    def all(self) -> SlotLayers | None:
        if self.refused is not None:
            return None
        return SlotLayers([self._made[i] for i in sorted(self._made)], self.device)


def _groups(layers: Sequence[Sequence[Linear]]) -> Iterator[ExpertGroup]:
    for leaves in layers:
        for moe in sparse_layers(leaves):
            yield from (moe.gate_up, moe.down)
