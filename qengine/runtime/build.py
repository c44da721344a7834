"""From an EngineConfig to a running engine: decide, load, allocate, warm up, report."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import torch

from qengine.config import EngineConfig
from qengine.core.pages import KVCacheManager
from qengine.core.plan import shrunk
from qengine.core.queue import Policy
from qengine.core.scheduler import Scheduler, SchedulerConfig
from qengine.core.swap_policy import SwapMode
from qengine.errors import CapacityError
from qengine.runtime import device as devices
from qengine.runtime import report
from qengine.runtime.capture import free_memory
from qengine.runtime.decide import Built, decide
from qengine.runtime.engine import Engine
from qengine.runtime.facts import EngineFacts
from qengine.runtime.graph_check import check_graphs
from qengine.runtime.graphs import capture_decodes
from qengine.runtime.kv_cache import KVCache, allocate
from qengine.runtime.kv_dtypes import block_bytes_line
from qengine.runtime.kv_scales import ResolvedScales
from qengine.runtime.kv_swap import comes_back, measure, start_swapping, take_host_memory
from qengine.runtime.loader import LoadReport
from qengine.runtime.offload import load_weights
from qengine.runtime.plan_input import CPU_RESERVE, GPU_RESERVE
from qengine.runtime.prompt_graphs import capture_prompts
from qengine.runtime.runner import Runner
from qengine.runtime.sampler import Sampler
from qengine.runtime.tile_tables import take_table
from qengine.runtime.warmup import warm_up


def build_engine(config: EngineConfig) -> Engine:
    """`config.model` is a local folder (see `qengine.prepare`). Raises UserError for all that cannot work."""
    start = time.perf_counter()
    b = decide(config)
    before = devices.allocated(b.device)
    loaded, offloaded = load_weights(b)
    b = settle(b)
    cache = _allocate(b)
    kept = devices.allocated(b.device) - before if b.device.type == "cuda" else loaded.total_bytes + cache.nbytes
    groups = b.memory.inputs.groups
    identity = f"{b.kv.name}:{_scale_version(b.scales)}"
    pages = KVCacheManager(b.memory.num_blocks, config.block_size, groups, config.enable_prefix_caching, identity)
    policy = cast(Policy, config.scheduling_policy)  # one of the option's choices
    limits = SchedulerConfig(b.batched_tokens, config.max_num_seqs, b.memory.max_model_len, policy)
    scheduler = Scheduler(limits, pages)
    sampler = Sampler(b.model.vocab_size, b.device, config.seed)
    runner = Runner(b.model, cache, sampler, len(groups), b.device)
    runner.weights, runner.expert_slots = offloaded.stream, offloaded.slots
    host = take_host_memory(runner, b.memory.inputs.swap_blocks)
    asynchronous = config.async_scheduling
    if asynchronous is None:
        asynchronous = b.device.type == "cuda"
    tiles = [take_table(b.device, b.info.name)] if b.device.type == "cuda" else []
    warm = [*tiles, f"Asynchronous scheduling: {'on' if asynchronous else 'off'}"]
    warm += warm_up(runner, b.batched_tokens, config.max_num_seqs, b.memory.max_model_len, b.device)
    if b.device.type == "cuda":
        warm += _capture(b, runner)
    if host is not None and not comes_back(host):
        warm.append("WARNING: KV swap: not used, because blocks did not come back from host memory as they went there")
    elif host is not None:
        measured = measure(runner, host, b.batched_tokens, b.memory.max_model_len)
        warm.append(f"KV swap: --swap-space {config.swap_space:g} GiB asked, {report.gib(host.nbytes)} pinned")
        warm += start_swapping(pages, host, cast(SwapMode, config.swap_policy), measured)
    runner.count_anew()
    tail = [*offloaded.lines, *warm, f"Ready after {time.perf_counter() - start:.1f} seconds"]
    lines = _report(b, loaded, cache, kept, tail)
    facts = EngineFacts(
        model_folder=config.model or "",
        tokenizer_folder=config.tokenizer or config.model or "",
        vocab_size=b.model.vocab_size,
        max_model_len=b.memory.max_model_len,
        kv_tokens=b.memory.kv_tokens,
        block_size=config.block_size,
        model_context=b.model.max_position,
        report=lines,
    )
    return Engine(scheduler, pages, runner, facts, asynchronous)


def settle(b: Built) -> Built:
    """The plan against what is free now that the weights are loaded: a neighbour may have taken memory meanwhile.

    What a neighbour has freed is left to it. Raises CapacityError with total, free, asked and who else is there when
    the KV cache that was planned no longer fits and a smaller one won't do.
    """
    devices.empty_cache(b.device)
    free = devices.memory(b.device).free
    # The reserve is for what comes on top of tensors, part of which is there by now.
    room = free - (GPU_RESERVE if b.device.type == "cuda" else CPU_RESERVE) // 2
    m = b.memory
    if m.kv_bytes + m.null_block_bytes + m.inputs.working <= room:
        return b
    smaller = shrunk(m, room)
    if smaller is None:
        raise _taken(b, free)
    note = (
        f"WARNING: other processes have taken memory since the start ({report.gib(free)} are free now): the KV cache "
        f"is {report.gib(smaller.kv_bytes)} instead of {report.gib(m.kv_bytes)}"
    )
    return replace(b, memory=smaller, notes=[*b.notes, note])


def _taken(b: Built, free: int) -> CapacityError:
    m = b.memory
    others = ", ".join(devices.neighbours(b.device))
    need = (m.inputs.blocks_for(m.max_model_len) + 1) * m.inputs.block_bytes + m.inputs.working
    return CapacityError(
        "other processes have taken memory since the start",
        have=f"{report.gib(free)} free of {report.gib(m.inputs.total)}, {report.gib(m.inputs.free)} at the start"
        + (f"; also there: {others}" if others else ""),
        need=f"{report.gib(need)} for {m.max_model_len} tokens beside the weights",
        hint="starting again: the plan is made anew from what is free",
    )


def _allocate(b: Built) -> KVCache:
    try:
        return allocate(
            b.model.attention, b.memory.inputs.groups, b.layouts, b.memory.num_blocks, b.kv, b.scales.scales,
            b.device, b.info, b.dtype,
        )  # fmt: skip
    except (MemoryError, RuntimeError) as e:  # torch raises either, by device
        if "memory" not in str(e).lower():
            raise
        raise _taken(b, devices.memory(b.device).free) from e


def _capture(b: Built, runner: Runner) -> list[str]:
    """Capture graphs unless told not to; returns report lines."""
    if b.config.enforce_eager:
        return ["CUDA graphs: none (--enforce-eager)"]
    m = b.memory
    free, pools = free_memory(b.device), torch.cuda.memory_reserved(b.device)
    graphs, line = capture_decodes(
        b.model, b.config.max_num_seqs, m.max_model_len, len(m.inputs.groups), b.config.block_size, b.device,
        runner.weights,
    )  # fmt: skip
    lines = [line]
    if graphs is not None:
        runner.prompt_graphs, line = capture_prompts(b.model, b.batched_tokens, graphs, runner.weights)
        lines.append(line)
    runner.use_graphs(graphs)
    lines += check_graphs(runner, m.max_model_len - 1)
    runner.cache.zero_blocks([0])
    taken = free - free_memory(b.device)
    pools = torch.cuda.memory_reserved(b.device) - pools
    lines.append(report.graph_memory_line(m.inputs.graphs, taken, pools, m.inputs.total))
    return lines


def _scale_version(scales: ResolvedScales) -> str:
    """Names the scales in a block's identity: blocks written with other scales must not be shared."""
    values = [s for pair in scales.scales.values() for s in (*pair.k.tolist(), *pair.v.tolist())]
    return str(hash(tuple(values)))


def _report(b: Built, loaded: LoadReport, cache: KVCache, kept: int, tail: list[str]) -> list[str]:
    """`kept`: bytes of weights and KV cache as the allocator counts them."""
    m = b.memory
    to_keep = sum(m.inputs.weights.values()) - m.inputs.offloaded.saved + m.kv_bytes + m.null_block_bytes
    name = str(b.dtype).removeprefix("torch.")
    neighbours = devices.neighbours(b.device) if b.device.type == "cuda" else ()
    lines = [
        f"Device: {b.info.type} {b.info.name}".rstrip(),
        f"Compute dtype: {name} ({b.dtype_reason}); weights: {b.choice.reason}; KV cache: {b.kv.name}",
        *(f"Also on this GPU: {line}" for line in neighbours),
        *b.notes,
        *b.checkpoint.notes,
        *b.load_plan.notes,
        *b.kv.notes,
        *b.scales.notes,
        *(f"WARNING: {w}" for w in [*b.load_plan.warnings, *b.scales.warnings, *loaded.warnings]),
        *report.weight_lines(loaded.seconds, loaded.bytes_by_format, b.load_plan.total_bytes),
        f"Peak host memory while loading: {report.gib(loaded.peak_host_bytes)}",
        *report.kernel_lines(b.model.leaves, b.model.attention),
        *report.scale_lines(b.kv, b.scales.scales),
        block_bytes_line(b.layouts),
        "Memory plan: " + "; ".join(f"{what} {report.gib(size)}" for what, size in m.items()),
        report.agreement_line("KV cache with the null block", m.kv_bytes + m.null_block_bytes, cache.nbytes),
        report.agreement_line("Weights and KV cache", to_keep, kept),
        *report.kv_lines(m.kv_tokens, m.max_model_len, m.concurrency(m.max_model_len), b.device.type == "cuda"),
    ]
    if b.config.trust_remote_code:
        lines.insert(0, report.REMOTE_CODE)
    return lines + tail
