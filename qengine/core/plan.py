"""How a device's memory is divided: what a plan depends on, and what comes out. Pure functions.

The null block (id 0, see `pool`) comes on top of the KV pool: a pool of 64 blocks has 65 block ids, and the extra
block is a line of the plan. `kv_bytes`, `kv_tokens` and `num_usable_blocks` never include it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qengine.core.host_tier import stage_bytes
from qengine.core.memory import ActivationShape, activation_bytes, format_bytes, most_tokens
from qengine.core.offload import Offload, OffloadUnit, choices, offload_bytes
from qengine.core.step import KVGroupSpec, blocks_for

LEAST_LEN = 2
"""Shortest useful sequence: a prompt of one token and one to answer."""
OFFLOAD_LEN = 4096
"""Tokens of context that automatic offload makes room for when no length is asked for, at most the model's own; also
what automatic expert slots leave room for."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """What a plan depends on; sizes in bytes.

    `total`, `free`     of the device, before anything of ours is loaded
    `reserve`           left untouched out of `free`
    `logit_rows`        rows of a step that get logits, at most
    `block_bytes`       what one block id costs over all layers (`sum(storage_bytes(...))`)
    `max_chunk`         max_num_batched_tokens: the most tokens of a step; bounds what a sliding-window group holds
    `max_model_len`     asked for; None: the largest that fits, at most `model_max_len`
    `kv_cache_memory_bytes`  wins over `utilization`
    `kv_default`        the KV cache when no size is asked for; more only where one request needs it. None: all there is
    `length_bytes`      for each token of the longest request, what a prompt's attention needs beside the cache
    `alternatives`      other KV dtypes by name: their block_bytes
    `units`, `offload`  decoder layers, and bytes of them that are to live in host memory; None: as many as it takes
    `expert_slots`      experts of each offloaded layer that are on the device as well; None: as many as fit
    `host_free`         host memory that offloaded layers may take; None: not known
    `swap`              host memory for KV blocks; 0: none
    `step_bytes`        weights that a step of one sequence reads
    `memory_bandwidth`, `link_bandwidth`  of the device and from host memory to it, bytes a second; None: not known
    `neighbours`        asked when something is refused: lines on who else holds memory
    """

    total: int
    free: int
    weights: Mapping[str, int]
    shape: ActivationShape
    logit_rows: int
    groups: Sequence[KVGroupSpec]
    block_bytes: int
    block_size: int
    max_chunk: int
    model_max_len: int
    max_model_len: int | None = None
    utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    kv_default: int | None = None
    reserve: int = 0
    graphs: int = 0
    length_bytes: int = 0
    alternatives: Mapping[str, int] = field(default_factory=dict)
    units: Sequence[OffloadUnit] = ()
    offload: int | None = 0
    expert_slots: int | None = 0
    host_free: int | None = None
    swap: int = 0
    step_bytes: int = 0
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    neighbours: Callable[[], Sequence[str]] = tuple

    @property
    def others(self) -> int:
        """In use on the device by others."""
        return self.total - self.free

    @cached_property
    def activations(self) -> int:
        return activation_bytes(self.shape, self.max_chunk, self.logit_rows)

    @cached_property
    def offloaded(self) -> Offload:
        return offload_bytes(self.units, self.offload or 0, self.expert_slots or 0)

    @property
    def host_fits(self) -> bool:
        """Whether host memory holds what is to be offloaded."""
        return self.host_free is None or self.offloaded.nbytes <= self.host_free

    @property
    def swap_blocks(self) -> int:
        """Blocks that host memory holds."""
        return self.swap // self.block_bytes

    @property
    def swap_buffers(self) -> int:
        """What copies to host memory and back need on the device."""
        return stage_bytes(self.block_bytes) if self.swap_blocks else 0

    @property
    def gathered(self) -> int:
        """What attention gathers for the longest prompt."""
        return self.length_bytes * (self.max_model_len or LEAST_LEN)

    @property
    def fixed(self) -> int:
        """Everything on the device but the KV cache."""
        return sum(self.weights.values()) - self.offloaded.saved + self.working

    @property
    def working(self) -> int:
        """What steps need beside weights and KV cache."""
        return self.activations + self.gathered + self.graphs + self.swap_buffers

    @property
    def budget(self) -> int:
        """What qengine may use: a share of the device, but no more than what is free less the reserve.

        With `kv_cache_memory_bytes` the share does not count."""
        physical = self.free - self.reserve
        if self.kv_cache_memory_bytes is not None:
            return physical
        return min(int(self.utilization * self.total), physical)

    @property
    def usable_blocks(self) -> int:
        """Blocks without the null block; may be below zero."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes // self.block_bytes
        return (self.budget - self.fixed) // self.block_bytes - 1

    def most_tokens(self, num_blocks: int) -> int:
        """Longest sequence that many blocks hold, at most the model's own maximum."""
        limit = max(self.model_max_len, self.max_model_len or 0)
        return most_tokens(self.groups, max(0, num_blocks), self.block_size, self.max_chunk, limit)

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(self.groups, num_tokens, self.block_size, self.max_chunk)

    @property
    def needed_blocks(self) -> int:
        """The fewest blocks that will do."""
        return self.blocks_for(self.max_model_len or LEAST_LEN)

    @property
    def claim_fits(self) -> bool:
        """Whether `kv_cache_memory_bytes`, where asked for, are there."""
        if self.kv_cache_memory_bytes is None:
            return True
        return self.fixed + (self.usable_blocks + 1) * self.block_bytes <= self.budget


@dataclass(frozen=True)
class MemoryPlan:
    """What will be allocated. `num_blocks` counts block ids, the null block included; everything else does not."""

    inputs: PlanInput
    num_blocks: int
    max_model_len: int

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def kv_bytes(self) -> int:
        return self.num_usable_blocks * self.inputs.block_bytes

    @property
    def null_block_bytes(self) -> int:
        return self.inputs.block_bytes

    @property
    def planned(self) -> int:
        """Bytes of all lines together."""
        return self.inputs.fixed + self.kv_bytes + self.null_block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds: in full-attention models its slots, else those of as many sequences of
        `max_model_len` as fit (a sliding window holds only its last tokens)."""
        if all(group.window is None for group in self.inputs.groups):
            return self.num_usable_blocks // len(self.inputs.groups) * self.inputs.block_size
        return int(self.concurrency(self.max_model_len) * self.max_model_len)

    def concurrency(self, num_tokens: int) -> float:
        """How many requests of `num_tokens` tokens the KV cache holds at once."""
        return self.num_usable_blocks / self.inputs.blocks_for(num_tokens)

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache for one token where every layer sees all tokens; a window's layers count while it fills."""
        return self.inputs.block_bytes * len(self.inputs.groups) / self.inputs.block_size

    @property
    def offload_ceiling(self) -> float | None:
        """Steps a second that copying the offloaded layers allows at most; None without offload or link speed."""
        i = self.inputs
        if not i.offloaded.step_bytes or i.link_bandwidth is None:
            return None
        return i.link_bandwidth / i.offloaded.step_bytes

    @property
    def slot_ceiling(self) -> float | None:
        """Steps of one token a second that copying its experts allows where none of them has a slot; None without slots
        or link speed."""
        i = self.inputs
        if not i.offloaded.token_bytes or i.link_bandwidth is None:
            return None
        return i.link_bandwidth / i.offloaded.token_bytes

    @property
    def memory_ceiling(self) -> float | None:
        """Steps of one sequence a second that reading the weights allows at most; None without a known bandwidth."""
        i = self.inputs
        return i.memory_bandwidth / i.step_bytes if i.memory_bandwidth is not None and i.step_bytes else None

    def items(self) -> list[tuple[str, int]]:
        """(name, bytes) of each line: five of the device, then those that add up to `planned`."""
        i = self.inputs
        moved = i.offloaded
        return [
            ("device total", i.total),
            ("free at start", i.free),
            ("used by others", i.others),
            ("reserve", i.reserve),
            ("budget", i.budget),
            *((f"weights {name}", size) for name, size in i.weights.items()),
            *((("offloaded to host memory", -moved.nbytes), ("offload buffers", moved.buffers)) if moved.units else ()),
            *(((f"expert slots ({i.expert_slots} a layer)", moved.slots),) if moved.slots else ()),
            ("activations (peak)", i.activations),
            *((("gathered for the longest prompt", i.gathered),) if i.length_bytes else ()),
            ("graphs", i.graphs),
            *((("buffers of KV swap", i.swap_buffers),) if i.swap_blocks else ()),
            (f"KV cache ({self.num_usable_blocks} blocks of {i.block_size} tokens)", self.kv_bytes),
            ("null block", self.null_block_bytes),
        ]

    def host_items(self) -> list[tuple[str, int]]:
        """(name, bytes) of what is pinned in host memory."""
        i = self.inputs
        swap = (f"KV swap ({i.swap_blocks:,} blocks)", i.swap_blocks * i.block_bytes)
        return [
            *((("offloaded weights", i.offloaded.nbytes),) if i.offloaded.units else ()),
            *((swap,) if i.swap_blocks else ()),
        ]

    def ceiling_lines(self) -> list[str]:
        """What bounds the rate of steps, where the bandwidths are known."""
        i, lines = self.inputs, []
        if (rate := self.memory_ceiling) is not None:
            read = format_bytes(i.step_bytes)
            lines.append(f"at most {rate:.1f} steps/s for one sequence: {read} of weights are read in a step")
        if (rate := self.offload_ceiling) is not None:
            moved = f"{format_bytes(i.offloaded.step_bytes)} over {(i.link_bandwidth or 0) / 1e9:.1f} GB/s"
            whole = " that copy whole layers" if i.offloaded.slots else " with this offload"
            lines.append(f"at most {rate:.2f} steps/s{whole}: {moved}")
        if (rate := self.slot_ceiling) is not None:
            lines.append(
                f"at most {rate:.1f} steps/s of one token when none of its experts has a slot "
                f"({format_bytes(i.offloaded.token_bytes)}), {2 * rate:.1f} when half of them have, and so on"
            )
        return lines

    def lines(self) -> list[str]:
        """The plan as text, one line an item, then tokens, concurrency and ceilings."""
        concurrency = self.concurrency(self.max_model_len)
        return [
            *(f"{name}: {format_bytes(size)}" for name, size in self.items()),
            f"KV cache size: {self.kv_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {concurrency:.2f}x",
            *self.ceiling_lines(),
        ]


def attempt(inputs: PlanInput) -> MemoryPlan | None:
    """The plan, or None when something does not fit (`qengine.core.refusal` says what, and what would)."""
    if inputs.expert_slots is None:
        return _slotted(inputs)
    if inputs.offload is None:
        return _offloaded(inputs)
    if inputs.model_max_len < LEAST_LEN or (inputs.max_model_len or 0) > inputs.model_max_len:
        return None
    usable = inputs.usable_blocks
    if not inputs.claim_fits or not inputs.host_fits or usable < inputs.needed_blocks:
        return None
    if inputs.length_bytes and inputs.max_model_len is None:
        return _longest(inputs)
    length = inputs.max_model_len or min(inputs.most_tokens(usable), inputs.model_max_len)
    if inputs.kv_default is not None and inputs.kv_cache_memory_bytes is None:
        enough = max(inputs.kv_default // inputs.block_bytes, inputs.blocks_for(length))
        usable = min(usable, enough)
        length = inputs.max_model_len or min(inputs.most_tokens(usable), inputs.model_max_len)
    return MemoryPlan(inputs, usable + 1, length)


def _longest(inputs: PlanInput) -> MemoryPlan | None:
    """The longest request whose blocks and whose gathered prompt fit together."""

    def at(length: int) -> MemoryPlan | None:
        return attempt(replace(inputs, max_model_len=length))

    length = largest(lambda n: at(n) is not None, LEAST_LEN, inputs.model_max_len)
    return None if length is None else at(length)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number of low..high that fits, where smaller ones fit if larger ones do."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _offloaded(inputs: PlanInput) -> MemoryPlan | None:
    """As few layers in host memory as it takes to hold the length asked for, or OFFLOAD_LEN. The length is fixed then,
    so that more memory means less offload and never a shorter context. Where even all layers are not enough for
    OFFLOAD_LEN, the longest context."""
    goal = inputs.max_model_len or min(inputs.model_max_len, OFFLOAD_LEN)
    resident = attempt(replace(inputs, offload=0))
    if resident is not None and resident.max_model_len >= goal:
        return resident
    for choice in choices(inputs.units, inputs.expert_slots or 0):
        found = attempt(replace(inputs, offload=choice.nbytes, max_model_len=goal))
        if found is not None:
            return found
    everything = attempt(replace(inputs, offload=most_offload(inputs)))
    if everything is None or (resident is not None and resident.max_model_len >= everything.max_model_len):
        return resident
    return everything


def _slotted(inputs: PlanInput) -> MemoryPlan | None:
    """As many expert slots as leave room for the length asked for, or OFFLOAD_LEN. Where offload is automatic too and
    not everything fits on the device, experts of all layers are offloaded: few misses in every layer cost less than
    many in some. Where not even the experts of one token have room, none."""
    goal = inputs.max_model_len or min(inputs.model_max_len, OFFLOAD_LEN)
    without = replace(inputs, expert_slots=0)
    if inputs.offload is None:
        resident = attempt(replace(without, offload=0))
        if resident is not None and resident.max_model_len >= goal:
            return resident
    moved = replace(inputs, offload=most_offload(inputs)) if inputs.offload is None else inputs

    def at(slots: int) -> MemoryPlan | None:
        return attempt(replace(moved, expert_slots=slots, max_model_len=goal))

    least = max((unit.top_k for unit in inputs.units), default=1)
    most = largest(lambda slots: at(slots) is not None, least, max((u.experts for u in inputs.units), default=0))
    return attempt(without) if most is None else at(most)


def most_offload(inputs: PlanInput) -> int:
    """Bytes of the most layers that host memory holds."""
    fitting = [c.nbytes for c in choices(inputs.units) if inputs.host_free is None or c.nbytes <= inputs.host_free]
    return max(fitting, default=0)


def shrunk(plan: MemoryPlan, room: int) -> MemoryPlan | None:
    """The same plan when only `room` bytes are left for what is still to be allocated (activations, graphs and the KV
    cache): fewer blocks, and where the length was not asked for, a shorter one. None when that does not do."""
    i = plan.inputs
    blocks = min(plan.num_blocks, (room - i.working) // i.block_bytes)
    if blocks - 1 < i.needed_blocks:
        return None
    length = min(plan.max_model_len, i.most_tokens(blocks - 1))
    return MemoryPlan(i, blocks, length)
