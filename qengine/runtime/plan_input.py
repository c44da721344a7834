"""From a model, its load plan and the options to the numbers that memory is planned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qengine.config import EngineConfig
from qengine.core.memory import ActivationShape, activation_bytes, group_layers, storage_bytes
from qengine.core.offload import OffloadUnit, bytes_of
from qengine.core.plan import PlanInput
from qengine.errors import CapabilityError, ConfigError
from qengine.layers.linear import Linear
from qengine.layers.moe import ExpertLinear
from qengine.models.model import Model
from qengine.plugin import DeviceInfo, KVLayout
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime import device as devices
from qengine.runtime.graphs import graph_bytes, graph_sizes
from qengine.runtime.kv_cache import layer_layouts
from qengine.runtime.kv_dtypes import KVDtypes
from qengine.runtime.loader import LoadPlan
from qengine.runtime.machine import Machine
from qengine.runtime.offload_units import expert_units, offload_units
from qengine.runtime.prompt_graphs import prompt_graph_bytes, prompt_sizes
from qengine.runtime.swap_space import swap_bytes
from qengine_kernels.launch import Chip
from qengine_kernels.paged_attention.gathered import SCORE_BYTES
from qengine_kernels.wna16_gemm import SCRATCH_BYTES

GPU_RESERVE = 256 << 20
"""Left free on a GPU: the driver's context, library handles, fragments between allocations."""
CPU_RESERVE = 512 << 20
HOST_RESERVE = 1 << 30
"""Left free of a GPU's host memory when weights are pinned there: the server, tokenizers, the file being read."""
CPU_KV_DEFAULT = 4 << 30
"""KV cache on a CPU when nothing is asked for; more only where one request of max_model_len needs it."""
DEFAULT_STEP = {"cuda": 8192, "cpu": 512}
SMALL_GPU, SMALL_GPU_STEP = 32 << 30, 2048
"""Below so many bytes, intermediate tensors of long steps would take the room that the KV cache needs."""
LOGIT_ROWS = 256


def batched_tokens(config: EngineConfig, info: DeviceInfo) -> int:
    small = info.type == "cuda" and info.total_memory < SMALL_GPU
    return config.max_num_batched_tokens or (SMALL_GPU_STEP if small else DEFAULT_STEP[info.type])


@dataclass(frozen=True)
class WeightNumbers:
    """What all linears together say, however memory is divided: bytes by format, the decoder layers as offload sees
    them, bytes that a step of one sequence reads, and what the hungriest kernel writes beside inputs and outputs."""

    bytes_by_format: Mapping[str, int]
    units: Sequence[OffloadUnit]
    step_bytes: int
    workspace: int

    @classmethod
    def of(
        cls, model: Model, load_plan: LoadPlan, dtype: torch.dtype, info: DeviceInfo, config: EngineConfig
    ) -> WeightNumbers:
        """Raises ConfigError for a pattern of --offload-layers that names nothing, and for --expert-slots that this
        model can't have."""
        units = _units(model, info, config) if info.type == "cuda" else []
        return cls(load_plan.bytes_by_format, units, _step_bytes(model, info), _workspace(model, dtype, info))


def plan_input(
    config: EngineConfig, machine: Machine, model: Model, weights: WeightNumbers, kv: KVDtypes, dtype: torch.dtype
) -> PlanInput:
    """Raises CapabilityError when the KV dtype does not run here, ConfigError for offload from a CPU to itself."""
    info = machine.info
    groups = group_layers([layer.spec.sliding_window for layer in model.attention])
    block_bytes = _block_bytes(model, layer_layouts(model.attention, kv, config.block_size, dtype, info))
    if config.cpu_offload_gb != 0 and not machine.is_gpu:
        raise ConfigError(
            "--cpu-offload-gb moves weights from a GPU to host memory, where --device cpu has them anyway",
            have="--device cpu",
            need="a GPU",
            hint="leave --cpu-offload-gb out",
        )
    host_free = None if machine.host_free is None else max(0, machine.host_free - HOST_RESERVE)
    swap = swap_bytes(config, machine.is_gpu, block_bytes, host_free)
    return PlanInput(
        total=machine.memory.total,
        free=machine.memory.free,
        weights=weights.bytes_by_format,
        shape=_shape(model, dtype, info, weights.workspace),
        logit_rows=min(config.max_num_seqs, LOGIT_ROWS),
        groups=groups,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_chunk=batched_tokens(config, info),
        model_max_len=model.max_position,
        max_model_len=config.max_model_len,
        utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        kv_default=None if machine.is_gpu else CPU_KV_DEFAULT,
        reserve=GPU_RESERVE if machine.is_gpu else CPU_RESERVE,
        graphs=_graph_bytes(config, model, dtype, info, len(groups), weights.workspace),
        length_bytes=_length_bytes(model, dtype) if gathers(info) else 0,
        alternatives=_alternatives(config, model, info, dtype, block_bytes),
        units=weights.units,
        offload=None if config.cpu_offload_gb is None else bytes_of(config.cpu_offload_gb),
        expert_slots=config.expert_slots,
        host_free=None if host_free is None else host_free - swap,
        swap=swap,
        step_bytes=weights.step_bytes,
        memory_bandwidth=machine.memory_bandwidth,
        link_bandwidth=machine.link_bandwidth,
        neighbours=machine.neighbours,
    )


def _block_bytes(model: Model, layouts: Sequence[KVLayout]) -> int:
    groups = group_layers([layer.spec.sliding_window for layer in model.attention])
    return sum(storage_bytes(groups, [layout.block_bytes for layout in layouts]))


def _shape(model: Model, dtype: torch.dtype, info: DeviceInfo, workspace: int) -> ActivationShape:
    spec = max((layer.spec for layer in model.attention), key=lambda s: s.num_heads * s.head_dim)
    return ActivationShape(
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        vocab=model.vocab_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        itemsize=dtype.itemsize,
        residual_itemsize=devices.residual_dtype(dtype, info).itemsize,
        workspace=workspace,
    )


def gathers(info: DeviceInfo) -> bool:
    """Whether prompts' attention gathers K and V of a whole sequence (`qengine_kernels.paged_attention.gathered`)."""
    return info.type == "cuda" and not Chip.known(info.sm).tensor_cores


def _length_bytes(model: Model, dtype: torch.dtype) -> int:
    """K and V of one token in the layer with the most of them, dense: one layer runs at a time."""
    return max(2 * layer.spec.num_kv_heads * layer.spec.head_dim for layer in model.attention) * dtype.itemsize


def _workspace(model: Model, dtype: torch.dtype, info: DeviceInfo) -> int:
    """On a GPU the largest quantised linear in the compute dtype (dequantise-then-GEMM), or scores and masks of
    attention over a gathered cache."""
    if info.type != "cuda":
        return 0
    dense = [(leaf, leaf.in_features * leaf.out_features * dtype.itemsize) for leaf in model.linears()]
    unpacked = max((size for leaf, size in dense if sum(leaf.resident_bytes(info).values()) < size), default=0)
    return max(unpacked, SCORE_BYTES if gathers(info) else 0)


def _graph_bytes(
    config: EngineConfig, model: Model, dtype: torch.dtype, info: DeviceInfo, num_groups: int, workspace: int
) -> int:
    """Fixed buffers, what the driver keeps, and the one pool for the tensors of all captured steps, which make no
    logits."""
    if info.type != "cuda" or config.enforce_eager:
        return 0
    blocks = -(-(config.max_model_len or model.max_position) // config.block_size)
    hidden, tokens = model.hidden_size, batched_tokens(config, info)
    kept = graph_bytes(config.max_num_seqs, hidden, dtype.itemsize, blocks * num_groups)
    shape = _shape(model, dtype, info, min(workspace, SCRATCH_BYTES))
    largest = graph_sizes(config.max_num_seqs)[-1]
    if not gathers(info) and (sizes := prompt_sizes(tokens)):
        kept += prompt_graph_bytes(tokens, hidden, dtype.itemsize)
        largest = max(largest, sizes[-1])
    return kept + activation_bytes(shape, largest, 0)


def _alternatives(
    config: EngineConfig, model: Model, info: DeviceInfo, dtype: torch.dtype, block_bytes: int
) -> Mapping[str, int]:
    """Installed KV dtypes that would take less here, by name, with their bytes for one block."""
    found: dict[str, int] = {}
    for record in list_plugins("kv"):
        try:
            other = KVDtypes.uniform(model.attention, load_plugin("kv", record.name))
            layouts = layer_layouts(model.attention, other, config.block_size, dtype, info)
        except CapabilityError:
            continue
        except Exception:  # a broken plugin may raise anything, and matters only to those who ask for it
            continue
        size = _block_bytes(model, layouts)
        if size < block_bytes and size not in found.values():
            found[record.name] = size
    return found


def _units(model: Model, info: DeviceInfo, config: EngineConfig) -> list[OffloadUnit]:
    """The decoder layers as offload sees them: what of each may go."""
    if config.expert_slots == 0:
        return [
            OffloadUnit(name, _resident(leaves, info))
            for name, leaves in offload_units(model, config.offload_layers).items()
        ]
    units = []
    for name, leaves in expert_units(model, config.offload_layers).items():
        specs = [leaf.group.layer.spec for leaf in leaves if isinstance(leaf, ExpertLinear)]
        units.append(OffloadUnit(name, _resident(leaves, info), specs[0].num_experts, specs[0].top_k))
    most = max(unit.top_k for unit in units)
    if config.expert_slots is not None and config.expert_slots < most:
        raise ConfigError(
            "--expert-slots must hold the experts of a token", have=config.expert_slots, need=f"{most} or more, or auto"
        )
    return units


def _resident(leaves: Sequence[Linear], info: DeviceInfo) -> int:
    return sum(sum(leaf.resident_bytes(info).values()) for leaf in leaves)


def _step_bytes(model: Model, info: DeviceInfo) -> int:
    """Weights that a step of one sequence reads; of experts, those that one token takes."""
    read = 0
    for leaf in model.linears():
        size = sum(leaf.resident_bytes(info).values())
        read += int(size * leaf.group.share) if isinstance(leaf, ExpertLinear) else size
    return read
