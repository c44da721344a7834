"""From an EngineConfig to a running engine: read headers, plan, load, allocate, warm up, report."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from qengine.config import EngineConfig
from qengine.core.memory import (
    ActivationShape,
    MemoryPlan,
    PlanInput,
    activation_bytes,
    group_layers,
    plan,
    storage_bytes,
)
from qengine.core.pages import KVCacheManager
from qengine.core.queue import Policy
from qengine.core.scheduler import Scheduler, SchedulerConfig
from qengine.errors import CapacityError, ConfigError, PluginError
from qengine.layers.module import ModelContext
from qengine.models.model import Model
from qengine.models.registry import build_model
from qengine.plugin import DeviceInfo, KVDtype, KVLayout
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime import device as devices
from qengine.runtime import report
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.dummy_weights import dummy_source
from qengine.runtime.engine import Engine
from qengine.runtime.facts import EngineFacts
from qengine.runtime.graphs import capture_decodes, graph_bytes
from qengine.runtime.kv_cache import KVCache, allocate, layer_layouts
from qengine.runtime.kv_scales import ResolvedScales, resolve_kv_scales
from qengine.runtime.kv_sidecar import read_sidecar
from qengine.runtime.loader import LoadPlan, LoadReport, load, resolve
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import QuantChoice, select_quant
from qengine.runtime.runner import Runner
from qengine.runtime.sampler import Sampler
from qengine.runtime.warmup import warm_up

GPU_RESERVE = 256 << 20
"""Left free on a GPU: the driver's context, library handles, fragments between allocations."""
CPU_RESERVE = 512 << 20
CPU_KV_DEFAULT = 4 << 30
"""KV cache on a CPU when nothing is asked for; more only where one request of max_model_len needs it."""
DEFAULT_BATCH = {"cuda": 8192, "cpu": 512}
LOGIT_ROWS = 256


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
    kv: KVDtype
    checkpoint: Checkpoint
    model: Model
    layouts: list[KVLayout]
    load_plan: LoadPlan
    scales: ResolvedScales
    memory: MemoryPlan
    notes: list[str] = field(default_factory=list)


def build_engine(config: EngineConfig) -> Engine:
    """`config.model` is a local folder (see `qengine.prepare`). Raises UserError for all that cannot work."""
    start = time.perf_counter()
    b = decide(config)
    loaded = load(b.load_plan)
    cache = allocate(
        b.model.attention, b.memory.inputs.groups, b.layouts, b.memory.num_blocks, b.kv, b.scales.scales,
        b.device, b.info, b.dtype,
    )
    groups = b.memory.inputs.groups
    identity = f"{b.kv.name}:{_scale_version(b.scales)}"
    pages = KVCacheManager(b.memory.num_blocks, config.block_size, groups, config.enable_prefix_caching, identity)
    policy = cast(Policy, config.scheduling_policy)  # one of the option's choices
    limits = SchedulerConfig(b.batched_tokens, config.max_num_seqs, b.memory.max_model_len, policy)
    scheduler = Scheduler(limits, pages)
    sampler = Sampler(b.model.vocab_size, b.device, config.seed)
    runner = Runner(b.model, cache, sampler, len(groups), b.device)
    warm = warm_up(runner, b.batched_tokens, config.max_num_seqs, b.memory.max_model_len, b.device)
    if b.device.type == "cuda":
        warm.append(_capture(b, runner))
    lines = _report(b, loaded, cache, [*warm, f"Ready after {time.perf_counter() - start:.1f} seconds"])
    facts = EngineFacts(
        model_folder=config.model or "",
        tokenizer_folder=config.tokenizer or config.model or "",
        vocab_size=b.model.vocab_size,
        max_model_len=b.memory.max_model_len,
        kv_tokens=b.memory.kv_tokens,
        block_size=config.block_size,
        report=lines,
    )
    return Engine(scheduler, pages, runner, facts)


def _capture(b: Built, runner: Runner) -> str:
    """Capture decode graphs unless told not to; returns a report line."""
    if b.config.enforce_eager:
        return "CUDA graphs: none (--enforce-eager)"
    m = b.memory
    runner.graphs, line = capture_decodes(
        b.model, b.config.max_num_seqs, m.max_model_len, len(m.inputs.groups), b.config.block_size, b.device
    )
    runner.cache.zero_blocks([0])
    return line


def decide(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Built:
    """Choose device, dtype, formats and the memory plan from headers alone. `checkpoint` is the opened `config.model`,
    where somebody has it already."""
    if config.model is None:
        raise ConfigError("no model", hint="a local folder or a hub name")
    device, info = devices.select_device(config.device)
    memory = devices.memory(device)
    dummy = config.load_format == "dummy"
    if checkpoint is None:
        folder = Path(config.model)
        checkpoint = Checkpoint.config_only(folder) if dummy else Checkpoint.open(folder)
    dtype, reason = devices.choose_dtype(config.dtype, checkpoint.dtype, info)
    choice = select_quant(config.quantization, checkpoint.quant)
    kv = load_plugin("kv", config.kv_cache_dtype)()
    hf = load_config(checkpoint, trust_remote_code=config.trust_remote_code)
    ctx = ModelContext(
        hf, device, info, dtype, devices.residual_dtype(dtype, info), config.max_model_len or 1 << 30
    )
    model = build_model(ctx)
    if config.max_model_len is None:
        ctx.max_model_len = model.max_position
    source = (
        dummy_source(model.leaves, choice.quant, checkpoint.quant, dtype, config.seed) if dummy else checkpoint
    )
    sidecar = None if dummy else read_sidecar(config.kv_scales, checkpoint)
    stored = checkpoint.quant.config if checkpoint.quant else None
    scales = resolve_kv_scales(source, model.attention, kv, stored, sidecar)
    plan_load = functools.partial(
        resolve, source=source, quant=choice.quant, dense=choice.dense, info=info, dtype=dtype, consumed=scales.consumed
    )
    load_plan = plan_load(model.leaves)
    layouts = layer_layouts(model.attention, kv, config.block_size, dtype, info)
    batched = config.max_num_batched_tokens or DEFAULT_BATCH[device.type]
    notes = _neighbour_notes(memory)
    compact = False
    try:
        memory_plan = _plan(config, model, load_plan, layouts, info, memory, batched, dtype)
    except CapacityError:
        compact = True
        smaller = plan_load(model.leaves, compact=True)
        if smaller.total_bytes == load_plan.total_bytes:
            raise
        memory_plan = _plan(config, model, smaller, layouts, info, memory, batched, dtype)
        notes.append(
            f"Memory is short: linears keep {report.gib(smaller.total_bytes)} instead of "
            f"{report.gib(load_plan.total_bytes)}, without the copies that make large batches fast"
        )
        load_plan = smaller
    if memory_plan.max_model_len != ctx.max_model_len:
        # Length-dependent rotary frequencies follow the final length, so the (still empty) model is built anew.
        ctx = dataclasses.replace(ctx, max_model_len=memory_plan.max_model_len, leaves=[], attention=[])
        model = build_model(ctx)
        load_plan = plan_load(model.leaves, compact=compact)
    return Built(
        config, device, info, dtype, reason, batched, choice, kv, checkpoint, model, layouts, load_plan, scales,
        memory_plan, notes,
    )


def _plan(
    config: EngineConfig,
    model: Model,
    load_plan: LoadPlan,
    layouts: list[KVLayout],
    info: DeviceInfo,
    memory: devices.DeviceMemory,
    batched: int,
    dtype: torch.dtype,
) -> MemoryPlan:
    groups = group_layers([layer.spec.sliding_window for layer in model.attention])
    block_bytes = sum(storage_bytes(groups, [layout.block_bytes for layout in layouts]))
    spec = max((layer.spec for layer in model.attention), key=lambda s: s.num_heads * s.head_dim)
    shape = ActivationShape(
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        vocab=model.vocab_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        itemsize=dtype.itemsize,
        residual_itemsize=devices.residual_dtype(dtype, info).itemsize,
        workspace=_workspace(model, dtype, info),
    )
    inputs = PlanInput(
        total=memory.total,
        free=memory.free,
        weights=load_plan.bytes_by_format,
        activations=activation_bytes(shape, batched, min(config.max_num_seqs, LOGIT_ROWS)),
        groups=groups,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_chunk=batched,
        model_max_len=model.max_position,
        max_model_len=config.max_model_len,
        utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        graphs=_graph_bytes(config, model, dtype, info, len(groups)),
        reserve=GPU_RESERVE if info.type == "cuda" else CPU_RESERVE,
        alternatives=_alternatives(config, model, info, dtype, block_bytes),
    )
    full = plan(inputs)
    if info.type == "cuda" or config.kv_cache_memory_bytes is not None:
        return full
    one = inputs.blocks_for(full.max_model_len) * block_bytes
    cap = min(full.kv_bytes, max(CPU_KV_DEFAULT, one))
    return plan(dataclasses.replace(inputs, kv_cache_memory_bytes=cap // block_bytes * block_bytes))


def _graph_bytes(config: EngineConfig, model: Model, dtype: torch.dtype, info: DeviceInfo, num_groups: int) -> int:
    if info.type != "cuda" or config.enforce_eager:
        return 0
    blocks = -(-(config.max_model_len or model.max_position) // config.block_size)
    return graph_bytes(
        config.max_num_seqs, model.hidden_size, model.vocab_size, dtype.itemsize, blocks * num_groups
    )


def _workspace(model: Model, dtype: torch.dtype, info: DeviceInfo) -> int:
    """The largest linear in 16 bits: what dequantise-then-GEMM writes beside its inputs on a GPU."""
    if info.type != "cuda":
        return 0
    return max((leaf.in_features * leaf.out_features for leaf in model.linears()), default=0) * dtype.itemsize


def _alternatives(
    config: EngineConfig, model: Model, info: DeviceInfo, dtype: torch.dtype, block_bytes: int
) -> Mapping[str, float]:
    """Installed KV dtypes that would take less here, by flag, with their bytes for one token."""
    found: dict[str, float] = {}
    groups = group_layers([layer.spec.sliding_window for layer in model.attention])
    for record in list_plugins("kv"):
        try:
            other = load_plugin("kv", record.name)()
        except PluginError:
            continue  # a broken plugin matters only to those who ask for it
        if not all(other.capability(info, layer.spec, dtype) for layer in model.attention):
            continue
        layouts = [other.layout(layer.spec, config.block_size, dtype) for layer in model.attention]
        size = sum(storage_bytes(groups, [layout.block_bytes for layout in layouts]))
        if size < block_bytes and size / config.block_size not in found.values():
            found[f"--kv-dtype {record.name}"] = size / config.block_size
    return found


def _scale_version(scales: ResolvedScales) -> str:
    """Names the scales in a block's identity: blocks written with other scales must not be shared."""
    values = [s for pair in scales.scales.values() for s in (*pair.k.tolist(), *pair.v.tolist())]
    return str(hash(tuple(values)))


def _neighbour_notes(memory: devices.DeviceMemory) -> list[str]:
    return [f"Also on this GPU: {line}" for line in memory.others]


def _report(b: Built, loaded: LoadReport, cache: KVCache, tail: list[str]) -> list[str]:
    m = b.memory
    name = str(b.dtype).removeprefix("torch.")
    lines = [
        f"Device: {b.info.type} {b.info.name}".rstrip(),
        f"Compute dtype: {name} ({b.dtype_reason}); weights: {b.choice.reason}; KV cache: {b.kv.name}",
        *b.notes,
        *b.checkpoint.notes,
        *b.load_plan.notes,
        *b.scales.notes,
        *(f"WARNING: {w}" for w in [*b.load_plan.warnings, *b.scales.warnings, *loaded.warnings]),
        *report.weight_lines(loaded.seconds, loaded.bytes_by_format, b.load_plan.total_bytes),
        f"Peak host memory while loading: {report.gib(loaded.peak_host_bytes)}",
        *report.kernel_lines(b.model.leaves, b.model.attention),
        *report.scale_lines(b.kv, b.scales.scales),
        "Memory plan: " + "; ".join(f"{what} {report.gib(size)}" for what, size in m.items()),
        report.agreement_line("KV cache with the null block", m.kv_bytes + m.null_block_bytes, cache.nbytes),
        *report.kv_lines(m.kv_tokens, m.max_model_len, m.concurrency(m.max_model_len), b.device.type == "cuda"),
    ]
    if b.config.trust_remote_code:
        lines.insert(0, "WARNING: --trust-remote-code is on: Python code that came with the model runs here")
    return lines + tail
