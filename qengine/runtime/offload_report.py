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
    layers = f"{len(moved.units)} of {len(inputs.units)} decoder layers ({gib(moved.nbytes)})"
    if not moved.units:
        return [f"--cpu-offload-gb {wanted}: nothing is offloaded, everything fits on the device"]
    notes = [f"--cpu-offload-gb {wanted}: {layers} in host memory, {gib(moved.buffers)} of buffers on the device"]
    if asked is not None and bytes_of(asked) > moved.nbytes:
        notes.append(f"--cpu-offload-gb {wanted} is more than the layers hold: {gib(moved.nbytes)} are moved")
    if len(moved.units) <= BUFFERS:
        notes.append("WARNING: so few layers are offloaded that each has a buffer of its own: no memory is saved")
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
