"""What serving will be, decided from headers: device, dtype, formats, kernels and the memory plan.

`qengine serve` builds what is decided here; `qengine plan` only shows it, also for GPUs that aren't here and for
models whose weights aren't.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qengine.config import EngineConfig
from qengine.core.plan import MemoryPlan, PlanInput
from qengine.core.refusal import plan
from qengine.errors import CapacityError, ConfigError
from qengine.layers.module import ModelContext
from qengine.models.model import Model
from qengine.models.registry import build_model, native_builder
from qengine.plugin import DeviceInfo, KVLayout
from qengine.runtime import device as devices
from qengine.runtime import report
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.described import DescribedSource
from qengine.runtime.dummy_weights import dummy_source
from qengine.runtime.kv_beside import choose_sidecar
from qengine.runtime.kv_cache import layer_layouts
from qengine.runtime.kv_dtypes import KVDtypes, asked_kv_dtypes, choose_kv_dtypes
from qengine.runtime.kv_scales import ResolvedScales, resolve_kv_scales
from qengine.runtime.loader import LoadPlan, resolve
from qengine.runtime.machine import Machine, this_machine
from qengine.runtime.model_config import load_config
from qengine.runtime.plan_input import WeightNumbers, batched_tokens, plan_input
from qengine.runtime.quant_select import QuantChoice, select_quant
from qengine.runtime.survey import TensorSource


@dataclass
class Surveyed:
    """What does not depend on how memory is divided. `rebuild(model, compact)` plans the loading of an empty model;
    `compact` takes the variants that keep fewer bytes."""

    config: EngineConfig
    machine: Machine
    dtype: torch.dtype
    dtype_reason: str
    choice: QuantChoice
    checkpoint: Checkpoint
    model: Model
    load_plan: LoadPlan
    kv: KVDtypes
    scales: ResolvedScales
    rebuild: Callable[[Model, bool], LoadPlan]
    weights: WeightNumbers

    def inputs(self, config: EngineConfig) -> PlanInput:
        """The memory plan's numbers with other memory and scheduling options."""
        return plan_input(config, self.machine, self.model, self.weights, self.kv, self.dtype)

    def compacted(self) -> Surveyed | None:
        """The same with fewer bytes kept, where formats can."""
        smaller = self.rebuild(self.model, True)
        if smaller.total_bytes == self.load_plan.total_bytes:
            return None
        numbers = WeightNumbers.of(self.model, smaller, self.dtype, self.machine.info, self.config)
        return dataclasses.replace(self, load_plan=smaller, weights=numbers)


ALL_LAYERS = "*"
"""The pattern of --offload-layers that means what its default does."""


@dataclass
class Built:
    """Everything that is decided from headers, before weights are read."""

    config: EngineConfig
    device: torch.device
    info: DeviceInfo
    dtype: torch.dtype
    dtype_reason: str
    batched_tokens: int
    choice: QuantChoice
    kv: KVDtypes
    checkpoint: Checkpoint
    model: Model
    layouts: list[KVLayout]
    load_plan: LoadPlan
    scales: ResolvedScales
    memory: MemoryPlan
    notes: list[str] = field(default_factory=list)


def decide(
    config: EngineConfig, checkpoint: Checkpoint | None = None, machine: Machine | None = None
) -> Built:
    """Choose everything and plan the memory. `checkpoint` is the opened `config.model`, where somebody has it already;
    `machine` another one than this."""
    return divide(look_at(config, checkpoint, machine))


def divide(s: Surveyed) -> Built:
    """Plan the memory of what has been looked at."""
    config = s.config
    notes: list[str] = []
    load_plan, compact = s.load_plan, False
    try:
        memory = plan(s.inputs(config))
    except CapacityError as e:
        smaller = s.compacted()
        if smaller is None:
            raise _with_all_layers(s, e) from None
        try:
            memory = plan(smaller.inputs(config))
        except CapacityError as still:
            raise _with_all_layers(smaller, still) from None
        notes.append(
            f"Memory is short: linears keep {report.gib(smaller.load_plan.total_bytes)} instead of "
            f"{report.gib(load_plan.total_bytes)}, without the copies that make large batches fast"
        )
        load_plan, compact = smaller.load_plan, True
    notes += _range_notes(s)
    model = s.model
    if memory.max_model_len != model.ctx.max_model_len:
        # Length-dependent rotary frequencies follow the final length, so the (still empty) model is built anew.
        model = build_model(
            dataclasses.replace(model.ctx, max_model_len=memory.max_model_len, leaves=[], attention=[])
        )
        load_plan = s.rebuild(model, compact)
    layouts = layer_layouts(model.attention, s.kv, config.block_size, s.dtype, s.machine.info)
    return Built(
        config, s.machine.device, s.machine.info, s.dtype, s.dtype_reason, batched_tokens(config, s.machine.info),
        s.choice, s.kv, s.checkpoint, model, layouts, load_plan, s.scales, memory, notes,
    )  # fmt: skip


def _with_all_layers(s: Surveyed, refused: CapacityError) -> CapacityError:
    """The same refusal, with what helps where --offload-layers leaves too little that may move."""
    if refused.changes or s.config.offload_layers in (None, ALL_LAYERS):
        return refused
    changes: dict[str, object] = {"offload_layers": ALL_LAYERS}
    hint = f"--offload-layers '{ALL_LAYERS}'"
    config = dataclasses.replace(s.config, offload_layers=ALL_LAYERS)
    weights = WeightNumbers.of(s.model, s.load_plan, s.dtype, s.machine.info, config)
    try:
        plan(dataclasses.replace(s, weights=weights).inputs(config))
    except CapacityError as e:
        if not e.changes:
            return refused
        changes |= e.changes
        hint += f" {e.hint}"
    return CapacityError(refused.message, have=refused.have, need=refused.need, hint=hint, changes=changes)


def _range_notes(s: Surveyed) -> list[str]:
    """Native families keep float32 where float16's range is too small; other people's modules don't."""
    if s.dtype is not torch.float16 or s.checkpoint.dtype is torch.float16 or native_builder(s.model.config):
        return []
    return [
        "WARNING: this model runs through transformers in float16, for which it was not trained: a request whose "
        "values leave float16's range ends with an error"
    ]


def look_at(
    config: EngineConfig,
    checkpoint: Checkpoint | None = None,
    machine: Machine | None = None,
    described: bool = False,
) -> Surveyed:
    """Read headers, choose formats, build the empty model. `described`: the checkpoint has no weights (or not those
    that serving would make), so headers are what its config says of them."""
    if config.model is None:
        raise ConfigError("no model", hint="a local folder or a hub name")
    machine = machine or this_machine(config.device)
    info = machine.info
    dummy = config.load_format == "dummy"
    if checkpoint is None:
        folder = Path(config.model)
        checkpoint = Checkpoint.config_only(folder) if dummy else Checkpoint.open(folder)
    dtype, reason = devices.choose_dtype(config.dtype, checkpoint.dtype, info)
    choice = select_quant(config.quantization, checkpoint.quant)
    asked = asked_kv_dtypes(config.kv_cache_dtype, config.kv_cache_dtype_skip_layers)
    hf = load_config(checkpoint, trust_remote_code=config.trust_remote_code)
    longest = config.max_model_len or 1 << 30
    ctx = ModelContext(hf, machine.device, info, dtype, devices.residual_dtype(dtype, info), longest)
    model = build_model(ctx)
    if config.max_model_len is None:
        ctx.max_model_len = model.max_position
    source: TensorSource = checkpoint
    if described:
        source = DescribedSource(model.leaves, choice.quant, checkpoint.dtype)
    elif dummy:
        source = dummy_source(model.leaves, choice.quant, checkpoint.quant, dtype, config.seed, machine.device)
    if dummy or described:
        sidecar, passed_over = None, list[str]()
    else:
        sidecar, passed_over = choose_sidecar(config.kv_scales, config.kv_cache_dtype, checkpoint)
    kv = choose_kv_dtypes(asked, model.attention, sidecar)
    stored = checkpoint.quant.config if checkpoint.quant else None
    scales = resolve_kv_scales(source, model.attention, kv, stored, sidecar)
    scales.notes += passed_over

    def rebuild(model: Model, compact: bool) -> LoadPlan:
        return resolve(
            model.leaves, source, choice.quant, choice.dense, info, dtype, consumed=scales.consumed,
            about=checkpoint, compact=compact, rounded_head=config.lm_head_int8,
        )  # fmt: skip

    load_plan = rebuild(model, False)
    if load_plan.unquantised:
        choice = choice.over_plain_weights()
    numbers = WeightNumbers.of(model, load_plan, dtype, info, config)
    return Surveyed(config, machine, dtype, reason, choice, checkpoint, model, load_plan, kv, scales, rebuild, numbers)
