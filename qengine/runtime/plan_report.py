"""What `qengine plan` says, as plain values: choices, refusals, the arithmetic, and what would fit."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from qengine.config import EngineConfig, options
from qengine.core.plan import MemoryPlan
from qengine.errors import CapabilityError, CapacityError, UserError
from qengine.plugin import DeviceInfo
from qengine.runtime import report
from qengine.runtime.decide import Surveyed, divide
from qengine.runtime.device_matrix import Target, kv_answers
from qengine.runtime.fit import Fit, Goal, fit
from qengine.runtime.graphs import graph_sizes
from qengine.runtime.machine import Machine, machine_for
from qengine.runtime.offload_report import offload_notes
from qengine.runtime.planning import look_at_model

SAFE_OPTIONS: tuple[tuple[str, object], ...] = (("dtype", "auto"), ("kv_cache_dtype", "auto"))
"""What is tried instead of a setting that the device refuses."""


@dataclass
class MemoryReport:
    """`lines` are (name, bytes): five of the device, then the parts of the plan; `host_lines` what is pinned in host
    memory; ceilings in steps a second."""

    lines: list[tuple[str, int]]
    host_lines: list[tuple[str, int]]
    planned_bytes: int
    token_bytes: float
    kv_tokens: int
    max_model_len: int
    concurrency: float
    offloaded_layers: list[str]
    offloaded_bytes: int
    expert_slots: int
    expert_slot_bytes: int
    memory_ceiling: float | None
    offload_ceiling: float | None
    slot_ceiling: float | None
    ceilings: list[str]

    @classmethod
    def of(cls, plan: MemoryPlan) -> MemoryReport:
        moved = plan.inputs.offloaded
        return cls(
            plan.items(),
            plan.host_items(),
            plan.planned,
            plan.token_bytes,
            plan.kv_tokens,
            plan.max_model_len,
            plan.concurrency(plan.max_model_len),
            [plan.inputs.units[i].name for i in moved.units],
            moved.nbytes,
            (plan.inputs.expert_slots or 0) if moved.slots else 0,
            moved.slots,
            plan.memory_ceiling,
            plan.offload_ceiling,
            plan.slot_ceiling,
            plan.ceiling_lines(),
        )


@dataclass
class FitReport:
    """`flags` are what to add to the command line; empty when everything fits as asked."""

    goal: Goal
    flags: str
    changes: dict[str, object]
    streams: float
    memory: MemoryReport

    @classmethod
    def of(cls, found: Fit) -> FitReport:
        memory = MemoryReport.of(found.plan)
        return cls(found.goal, flags_for(found.changes), found.changes, found.streams, memory)


@dataclass
class PlanReport:
    """`refused` is what serving would say, None when it would start; `would_work` then are flags with which it does."""

    model: str
    device: str
    here: bool
    choices: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    refused: str | None = None
    would_work: str = ""
    memory: MemoryReport | None = None
    fit: FitReport | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> Mapping[str, object]:
        return {"fits": self.refused is None, **dataclasses.asdict(self)}


def plan_report(config: EngineConfig, gpu: str | None = None, goal: Goal | None = None) -> PlanReport:
    """Plan the local folder `config.model` for the GPU named `gpu` (None: this machine). `goal`: also search what fits.

    What serving would refuse ends up in `refused`. Raises ConfigError for an unknown GPU, or none where one is asked
    for.
    """
    machine = machine_for(gpu, config.device)
    out = PlanReport(config.model or "", describe_device(machine), machine.here)
    try:
        s, notes = look_at_model(config, machine)
    except CapabilityError as e:
        out.refused = one_line(e)
        out.would_work = flags_for(_instead(config, machine))
        return out
    except UserError as e:
        out.refused = one_line(e)
        return out
    _choices(out, s)
    out.notes += [report.REMOTE_CODE] if config.trust_remote_code else []
    out.notes += [*notes, *s.checkpoint.notes, *s.load_plan.notes]
    out.notes += [f"WARNING: {w}" for w in [*s.load_plan.warnings, *s.scales.warnings]]
    try:
        built = divide(s)
        out.memory = MemoryReport.of(built.memory)
        out.notes += built.notes
        out.notes += offload_notes(config, built.memory.inputs)
        if out.memory.host_lines and not machine.here:
            out.notes.append("whether that machine has the host memory that is pinned is not known here")
    except CapacityError as e:
        out.refused = one_line(e)
        out.would_work = flags_for(e.changes)
    except UserError as e:
        out.refused = one_line(e)
        return out
    if goal is not None:
        found = fit(s, goal)
        out.fit = None if found is None else FitReport.of(found)
    return out


def one_line(e: Exception) -> str:
    return " ".join(str(e).split())


def describe_device(machine: Machine) -> str:
    info = machine.info
    kind = f"sm_{info.sm}" if machine.is_gpu else info.type
    return f"{info.name} ({kind}{'' if machine.here else ', not here'})".strip()


def _instead(config: EngineConfig, machine: Machine) -> dict[str, object]:
    """The fewest settings changed to auto with which nothing is refused any more, and what memory asks for then. Empty
    where there are none."""
    tries: list[dict[str, object]] = [{name: value} for name, value in SAFE_OPTIONS]
    tries.append(dict(SAFE_OPTIONS))
    for changes in tries:
        if any(getattr(config, name) == value for name, value in changes.items()):
            continue
        try:
            s, _ = look_at_model(dataclasses.replace(config, **changes), machine)  # type: ignore[arg-type]
        except UserError:
            continue
        return _with_memory(s, config, machine, changes)
    return {}


def _with_memory(
    s: Surveyed, config: EngineConfig, machine: Machine, changes: dict[str, object]
) -> dict[str, object]:
    """`changes`, with which `s` was looked at, and those that make its memory fit; empty where that is not known."""
    try:
        divide(s)
        return changes
    except CapacityError as e:
        more = {**changes, **e.changes}
        if not e.changes:
            return {}
    try:
        divide(look_at_model(dataclasses.replace(config, **more), machine)[0])  # type: ignore[arg-type]
    except UserError:
        return {}
    return more


def _choices(out: PlanReport, s: Surveyed) -> None:
    info, config = s.machine.info, s.config
    dtype = str(s.dtype).removeprefix("torch.")
    accumulate = "; float32 accumulation, norms, residual and logits" if dtype == "float16" else ""
    out.choices = {
        "compute dtype": f"{dtype} ({s.dtype_reason}{accumulate})",
        "weights": s.choice.reason,
        "KV cache": s.kv.name,
        "CUDA graphs": _graphs(config, info),
    }
    for leaf in s.model.linears():
        for scheme in leaf.schemes:
            if scheme.format not in out.kernels:
                answer = scheme.capability(info, s.dtype)
                out.kernels[scheme.format] = f"{answer.kind}: {answer.reason}" if answer.reason else answer.kind
    if s.model.attention:
        here = [Target(info.name, info, s.dtype)]
        answers = kv_answers(s.model.attention[0].spec, here)
        for name, (found,) in answers.items():
            if name == s.kv.name:
                out.kernels[f"KV cache {name}"] = f"{found.kind}: {found.reason}" if found.reason else found.kind


def _graphs(config: EngineConfig, info: DeviceInfo) -> str:
    if info.type != "cuda":
        return "none on a CPU"
    if config.enforce_eager:
        return "none (--enforce-eager)"
    sizes = graph_sizes(config.max_num_seqs)
    return f"decode steps of {sizes[0]} to {sizes[-1]} sequences, {len(sizes)} sizes"


def flags_for(changes: Mapping[str, object]) -> str:
    """Fields of the config as flags, each in its first spelling."""
    spelt = {f.name: opt.flags[0] if opt.flags else "--" + f.name.replace("_", "-") for f, opt in options(EngineConfig)}
    texts = {name: "auto" if value is None else shlex.quote(str(value)) for name, value in changes.items()}
    return " ".join(f"{spelt[name]} {text}" for name, text in texts.items())
