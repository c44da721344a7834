"""What is said about offload: asked and done, in `qengine plan` and in the start-up report."""

from __future__ import annotations

from qengine.config import EngineConfig
from qengine.core.offload import BUFFERS, bytes_of
from qengine.core.plan import MemoryPlan, PlanInput
from qengine.runtime.report import gib


def offload_notes(config: EngineConfig, inputs: PlanInput) -> list[str]:
    """What was asked for and what is done; nothing where neither is anything."""
    asked, moved = config.cpu_offload_gb, inputs.offloaded
    if asked == 0:
        return []
    wanted = "auto" if asked is None else f"{asked:g}"
    what = "" if config.expert_slots == 0 else "experts of "
    layers = f"{what}{len(moved.units)} of {len(inputs.units)} decoder layers ({gib(moved.nbytes)})"
    if not moved.units:
        return [f"--cpu-offload-gb {wanted}: nothing is offloaded, everything fits on the device"]
    notes = [f"--cpu-offload-gb {wanted}: {layers} in host memory, {gib(moved.buffers)} of buffers on the device"]
    if asked is not None and bytes_of(asked) > moved.nbytes:
        notes.append(f"--cpu-offload-gb {wanted} is more than the layers hold: {gib(moved.nbytes)} are moved")
    if config.expert_slots != 0:
        notes += _slot_notes(config, inputs)
    if len(moved.units) <= BUFFERS:
        notes.append("WARNING: so few layers are offloaded that each has a buffer of its own: no memory is saved")
    elif moved.saved <= 0:
        notes.append("WARNING: expert slots and copies' buffers take all that offload saves")
    return notes


def _slot_notes(config: EngineConfig, inputs: PlanInput) -> list[str]:
    """What was asked for in slots and what is planned."""
    asked = "auto" if config.expert_slots is None else str(config.expert_slots)
    units = [inputs.units[i] for i in inputs.offloaded.units]
    slots, experts = inputs.expert_slots or 0, max(unit.experts for unit in units)
    if not slots:
        return [f"--expert-slots {asked}: no memory is left for any: every step copies whole layers"]
    tokens = min(min(slots, unit.experts) // unit.top_k for unit in units)
    notes = [
        f"--expert-slots {asked}: {min(slots, experts)} of {experts} experts of each layer have a slot "
        f"({gib(inputs.offloaded.slots)}): steps of up to {tokens} tokens copy experts that have none, larger ones "
        "whole layers"
    ]
    if config.max_num_seqs > tokens:
        notes.append(f"--max-num-seqs {tokens} would keep every decode step so small; more sequences copy whole layers")
    if slots > experts:
        notes.append(f"--expert-slots {asked} is more than the {experts} experts of a layer")
    return notes


def pinned_line(pinned: int, moved: int) -> str:
    """Pinned host memory beside the weights that are in it."""
    return f"Offload: {gib(pinned)} of pinned host memory for {gib(moved)} of weights"


def rate_lines(plan: MemoryPlan) -> list[str]:
    """What copying allows, by the link's measured bandwidth."""
    rate, ceiling = plan.inputs.link_bandwidth, plan.offload_ceiling
    if rate is None or ceiling is None:
        return []
    copied = gib(plan.inputs.offloaded.step_bytes)
    return [f"Offload: copies run at {rate / 1e9:.1f} GB/s: at most {ceiling:.2f} steps/s of {copied} each"]


def slot_rate_lines(plan: MemoryPlan, rate: float | None) -> list[str]:
    """The same for steps of one token whose experts may have slots, where kernels read host memory at `rate`."""
    copied = plan.inputs.offloaded.token_bytes
    if rate is None or not copied:
        return []
    steps = rate / copied
    return [
        f"Offload: kernels read host memory at {rate / 1e9:.1f} GB/s: at most {steps:.1f} steps/s of one token when "
        f"none of its experts has a slot ({gib(copied)}), {2 * steps:.1f} when half of them have, and so on"
    ]
