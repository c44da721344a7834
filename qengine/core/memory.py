"""The memory planner: pure functions from sizes to a plan. Every number about memory that qengine shows comes from
here: the start-up report, `qengine plan` and the texts of refusals.

The null block (id 0, see `pool`) comes on top of the KV pool: a pool of 64 blocks has 65 block ids, and the extra
block is a line of the plan. `kv_bytes`, `kv_tokens` and `num_usable_blocks` never include it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qengine.core.step import KVGroupSpec, blocks_for
from qengine.errors import CapacityError

LEAST_LEN = 2
"""Shortest useful sequence: a prompt of one token and one to answer."""


def format_bytes(num_bytes: float) -> str:
    """Such as "512 B" or "1.00 MiB": powers of 1024."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


# KV groups and blocks


def group_layers(windows: Sequence[int | None]) -> list[KVGroupSpec]:
    """KV groups of a model whose layer i has the sliding window `windows[i]` (None: full attention).

    Layers of one kind may be spread over several groups, so that all groups have the same number of layers: that of
    the rarest kind, or of the commonest where that leaves fewer storage tensors unused. Only the last group of a kind
    can be shorter.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    if not counts:
        return []

    def unused(size: int) -> int:
        return sum(-count % size for count in counts)

    size = min((min(counts), max(counts)), key=unused)
    return [
        KVGroupSpec(window, layers[i : i + size])
        for window, layers in kinds.items()
        for i in range(0, len(layers), size)
    ]


def storage_bytes(groups: Sequence[KVGroupSpec], layer_block_bytes: Sequence[int]) -> list[int]:
    """Bytes of one block in each storage tensor: tensor j holds layer j of every group.

    `layer_block_bytes[i]` are the bytes of one block of layer i, as its KV layout says. The sum of the result is what
    one block id costs.
    """
    width = max((len(group.layers) for group in groups), default=0)
    return [max(layer_block_bytes[group.layers[j]] for group in groups if j < len(group.layers)) for j in range(width)]


def most_tokens(groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, max_chunk: int, limit: int) -> int:
    """Longest sequence, at most `limit` tokens, that `num_blocks` usable blocks can hold."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(groups, middle, block_size, max_chunk) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


# Activations


@dataclass(frozen=True)
class ActivationShape:
    """Widths of one decoder layer and of the head, in elements; itemsizes in bytes.

    `workspace` are bytes that the largest kernel needs beside its inputs and outputs (a dequantised weight, gathered
    K/V); it is counted once.
    """

    hidden: int
    intermediate: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    residual_itemsize: int
    workspace: int = 0


def activation_bytes(shape: ActivationShape, num_tokens: int, num_logit_rows: int) -> int:
    """Peak bytes of one step's intermediate tensors for `num_tokens` tokens, of which `num_logit_rows` get logits.

    The residual stream, its branch and the normed input live through every phase; beside them the largest of
    attention (q, k, v, rotated q and k, output), MLP (gate and up, their product, the result) and head (logits in the
    compute dtype and float32, the sampler's probabilities, sorted values and int64 order).
    """
    s = shape
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    stream = num_tokens * s.hidden * (s.residual_itemsize + 2 * s.itemsize)
    attention = num_tokens * (3 * q + 3 * kv) * s.itemsize
    mlp = num_tokens * (3 * s.intermediate + s.hidden) * s.itemsize
    head = num_logit_rows * s.vocab * (s.itemsize + 4 + 4 + 4 + 8)
    return stream + max(attention, mlp, head) + s.workspace


# The plan


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """What a plan depends on; sizes in bytes.

    `total`, `free`     of the device, before anything of ours is loaded
    `reserve`           left untouched out of `free`
    `block_bytes`       what one block id costs over all layers (`sum(storage_bytes(...))`)
    `max_chunk`         max_num_batched_tokens: bounds what a sliding-window group holds at once
    `max_model_len`     asked for; None: the largest that fits, at most `model_max_len`
    `alternatives`      other KV dtypes by flag ("--kv-dtype fp8"): bytes of one token slot, that is, what
                        block_bytes / block_size would be
    `kv_cache_memory_bytes`  wins over `utilization`
    """

    total: int
    free: int
    weights: Mapping[str, int]
    activations: int
    groups: Sequence[KVGroupSpec]
    block_bytes: int
    block_size: int
    max_chunk: int
    model_max_len: int
    max_model_len: int | None = None
    utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    reserve: int = 0
    graphs: int = 0
    alternatives: Mapping[str, float] = field(default_factory=dict)

    @property
    def others(self) -> int:
        """In use on the device by others."""
        return self.total - self.free

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return sum(self.weights.values()) + self.activations + self.graphs

    @property
    def budget(self) -> int:
        """What qengine may use: a share of the device, but no more than what is free less the reserve.

        With `kv_cache_memory_bytes` the share does not count."""
        physical = self.free - self.reserve
        if self.kv_cache_memory_bytes is not None:
            return physical
        return min(int(self.utilization * self.total), physical)

    def usable_blocks(self, block_bytes: int) -> int:
        """Blocks without the null block; may be below zero."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes // block_bytes
        return (self.budget - self.fixed) // block_bytes - 1

    def most_tokens(self, num_blocks: int) -> int:
        """Longest sequence that many blocks hold, at most the model's own maximum."""
        limit = max(self.model_max_len, self.max_model_len or 0)
        return most_tokens(self.groups, max(0, num_blocks), self.block_size, self.max_chunk, limit)

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(self.groups, num_tokens, self.block_size, self.max_chunk)


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

    def items(self) -> list[tuple[str, int]]:
        """(name, bytes) of each line, in the order of the sum."""
        i = self.inputs
        return [
            ("device total", i.total),
            ("free at start", i.free),
            ("used by others", i.others),
            ("reserve", i.reserve),
            ("budget", i.budget),
            *((f"weights {name}", size) for name, size in i.weights.items()),
            ("activations (peak)", i.activations),
            ("graphs", i.graphs),
            (f"KV cache ({self.num_usable_blocks} blocks of {i.block_size} tokens)", self.kv_bytes),
            ("null block", self.null_block_bytes),
        ]

    def lines(self) -> list[str]:
        """The plan as text, one line an item, then tokens and concurrency."""
        concurrency = self.concurrency(self.max_model_len)
        return [
            *(f"{name}: {format_bytes(size)}" for name, size in self.items()),
            f"KV cache size: {self.kv_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {concurrency:.2f}x",
        ]


def plan(inputs: PlanInput) -> MemoryPlan:
    """Divide the memory. Raises CapacityError, with the arithmetic and one change that would fit, when it can't be."""
    if inputs.max_model_len is not None and inputs.max_model_len > inputs.model_max_len:
        raise CapacityError(
            "max_model_len is above what the model was made for",
            have=f"{inputs.max_model_len} tokens",
            need=f"at most {inputs.model_max_len} tokens",
        )
    if inputs.model_max_len < LEAST_LEN:
        raise CapacityError(
            "the model has no room for an answer", have=f"{inputs.model_max_len} positions", need=f"{LEAST_LEN}"
        )
    usable = inputs.usable_blocks(inputs.block_bytes)
    fits = inputs.most_tokens(usable)
    needed = inputs.blocks_for(inputs.max_model_len or LEAST_LEN)
    claimed = inputs.kv_cache_memory_bytes is not None
    if (fits == 0 and not claimed) or (claimed and inputs.fixed + (usable + 1) * inputs.block_bytes > inputs.budget):
        raise _no_room(inputs, max(needed, usable) + 1)
    if usable < needed:
        raise _too_long(inputs, fits, needed)
    return MemoryPlan(inputs, usable + 1, inputs.max_model_len or min(fits, inputs.model_max_len))


def _no_room(inputs: PlanInput, num_blocks: int) -> CapacityError:
    """Weights and activations leave no memory for the KV cache (of `num_blocks` ids at least)."""
    cache = num_blocks * inputs.block_bytes
    need = inputs.fixed + cache
    missing = need - inputs.budget
    share = math.ceil(need / inputs.total * 100) / 100
    if inputs.kv_cache_memory_bytes is not None and inputs.budget - inputs.fixed >= 2 * inputs.block_bytes:
        hint = f"--kv-cache-memory-bytes {inputs.budget - inputs.fixed - inputs.block_bytes}"
    elif share <= 1 and int(share * inputs.total) <= inputs.free - inputs.reserve:
        hint = f"--gpu-memory-utilization {share:.2f}"
    elif missing < inputs.activations // 2:
        tokens = inputs.max_chunk * (inputs.activations - missing) // inputs.activations
        hint = f"--max-num-batched-tokens {max(1, tokens)} (activations now take {format_bytes(inputs.activations)})"
    else:
        hint = (
            f"{format_bytes(missing)} more free memory (others use {format_bytes(inputs.others)}), or smaller weights"
        )
    weights = ", ".join(f"{name} {format_bytes(size)}" for name, size in inputs.weights.items())
    return CapacityError(
        "no memory is left for the KV cache",
        have=f"{format_bytes(inputs.budget)} (total {format_bytes(inputs.total)}, free {format_bytes(inputs.free)}, "
        f"reserve {format_bytes(inputs.reserve)})",
        need=f"{format_bytes(need)} (weights {weights}; activations {format_bytes(inputs.activations)}; "
        f"graphs {format_bytes(inputs.graphs)}; KV cache {format_bytes(cache)})",
        hint=hint,
    )


def _too_long(inputs: PlanInput, fits: int, needed: int) -> CapacityError:
    """The KV cache exists but is too small for one request of the length asked for."""
    asked = inputs.max_model_len or LEAST_LEN
    have = inputs.usable_blocks(inputs.block_bytes) * inputs.block_bytes
    need = needed * inputs.block_bytes
    physical = inputs.free - inputs.reserve - inputs.fixed - inputs.block_bytes
    others = {
        name: inputs.most_tokens(inputs.usable_blocks(math.ceil(per_token * inputs.block_size)))
        for name, per_token in inputs.alternatives.items()
    }
    fitting = [f"{name} (holds {held} tokens)" for name, held in others.items() if held >= asked]
    if fitting:
        hint = fitting[0]
    elif need <= physical and inputs.kv_cache_memory_bytes is not None:
        hint = f"--kv-cache-memory-bytes {need}"
    elif fits >= LEAST_LEN:
        hint = f"--max-model-len {fits}, or auto"
    else:
        hint = f"--kv-cache-memory-bytes of at least {inputs.blocks_for(LEAST_LEN) * inputs.block_bytes}"
    if others and not fitting:
        hint += "; even " + ", ".join(f"{name} holds only {held} tokens" for name, held in others.items())
    return CapacityError(
        f"max_model_len {asked} does not fit into the KV cache"
        if inputs.max_model_len
        else "the KV cache is too small",
        have=f"{fits} tokens ({format_bytes(have)}, {have} bytes)",
        need=f"{asked} tokens ({format_bytes(need)}, {need} bytes)",
        hint=hint,
    )
