"""Loads the weights of a decided engine, and sets up the copying of those that live in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from qengine.runtime.decide import Built
from qengine.runtime.expert_slots import SlotLayers
from qengine.runtime.loader import LoadReport, load
from qengine.runtime.offload_report import offload_notes, pinned_line, rate_lines, slot_rate_lines
from qengine.runtime.offload_store import OffloadStore
from qengine.runtime.offload_units import expert_units, layer_linears, offload_units
from qengine.runtime.pinned import copy_rate
from qengine.runtime.weight_stream import CudaLane, WeightStream


@dataclass
class Offloaded:
    """`stream` is None where every weight is on the device, `slots` where experts have none. `lines` are for the report
    of a start."""

    stream: WeightStream | None = None
    slots: SlotLayers | None = None
    lines: list[str] = field(default_factory=list)


def load_weights(b: Built) -> tuple[LoadReport, Offloaded]:
    """Raises CheckpointError as `load` does, and CapacityError where host memory can't be pinned."""
    inputs = b.memory.inputs
    notes = offload_notes(b.config, inputs)
    names = [inputs.units[i].name for i in inputs.offloaded.units]
    if not names:
        return load(b.load_plan), Offloaded(lines=notes)
    units = offload_units if b.config.expert_slots == 0 else expert_units
    own, hooked = units(b.model, b.config.offload_layers), layer_linears(b.model)
    store = OffloadStore([own[name] for name in names], b.device, inputs.expert_slots or 0)
    loaded = load(b.load_plan, store=store)
    stream = store.stream(CudaLane(b.device), [hooked[name] for name in names])
    rate = copy_rate(stream.sources[0].bytes, stream.buffers[0])
    measured = replace(b.memory, inputs=replace(inputs, link_bandwidth=rate))
    lines = [*notes, *store.notes, pinned_line(store.nbytes, inputs.offloaded.nbytes), *rate_lines(measured)]
    if store.slots is not None:
        lines += [store.slots.line(), *slot_rate_lines(b.memory, store.slots.read_rate)]
    return loaded, Offloaded(stream, store.slots, lines)
