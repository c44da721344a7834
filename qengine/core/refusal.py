"""Plans, or refuses with the arithmetic and the smallest change that fits. Every change that is named has been planned
with: applied, it passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from qengine.core.memory import format_bytes
from qengine.core.offload import choices, gib_for
from qengine.core.plan import LEAST_LEN, OFFLOAD_LEN, MemoryPlan, PlanInput, attempt, largest, most_offload
from qengine.errors import CapacityError

LEAST_CHUNK = 16
"""Tokens of a step below which nobody wants to serve."""
ROUNDED_BITS = 6
"""Of a KV cache's size that is advised; at most 3 % of what is there go unused by it."""
LEAST_SEQUENCES = 4
"""Requests at once, likewise."""
FLAGS = {
    "kv_cache_dtype": "--kv-dtype",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "max_model_len": "--max-model-len",
    "cpu_offload_gb": "--cpu-offload-gb",
    "expert_slots": "--expert-slots",
}


@dataclass(frozen=True)
class Change:
    """Other values for fields of the engine's config, and the plan's input with them."""

    fields: Mapping[str, object]
    inputs: PlanInput

    def text(self) -> str:
        return " ".join(f"{FLAGS[name]} {'auto' if value is None else value}" for name, value in self.fields.items())


def plan(inputs: PlanInput) -> MemoryPlan:
    """Divide the memory. Raises CapacityError when it can't be: have, need, and what would fit."""
    found = attempt(inputs)
    if found is None:
        raise _refusal(_with_least(inputs))
    return found


def _with_least(inputs: PlanInput) -> PlanInput:
    """What is automatic, with as little on the device as can be."""
    offload = most_offload(inputs) if inputs.offload is None else inputs.offload
    return replace(inputs, offload=offload, expert_slots=inputs.expert_slots or 0)


def _refusal(inputs: PlanInput) -> CapacityError:
    if (inputs.max_model_len or 0) > inputs.model_max_len >= LEAST_LEN:
        return _above_the_model(inputs)
    if inputs.model_max_len < LEAST_LEN:
        return CapacityError(
            "the model has no room for an answer", have=f"{inputs.model_max_len} positions", need=f"{LEAST_LEN}"
        )
    if not inputs.host_fits:
        return _no_host_memory(inputs)
    usable = inputs.usable_blocks
    claimed = inputs.kv_cache_memory_bytes is not None
    if not inputs.claim_fits or (inputs.most_tokens(usable) == 0 and not claimed):
        return _no_room(inputs, max(inputs.needed_blocks, usable) + 1)
    return _too_long(inputs, inputs.most_tokens(usable))


def first_that_fits(candidates: Iterator[Change]) -> Change | None:
    """The first change with which the plan passes."""
    return next((change for change in candidates if attempt(change.inputs) is not None), None)


# Changes, each kind with the smallest value that helps


def _dtypes(i: PlanInput) -> Iterator[Change]:
    for name, size in i.alternatives.items():
        yield Change({"kv_cache_dtype": name}, replace(i, block_bytes=size, alternatives={}))


def _cache_bytes(i: PlanInput) -> Iterator[Change]:
    """Another size of a KV cache whose size was asked for: what there is, where more was asked for, rounded down as
    free memory varies; else what the length needs."""
    if i.kv_cache_memory_bytes is not None:
        there, need = max(0, i.budget - i.fixed - i.block_bytes), i.needed_blocks * i.block_bytes
        step = 1 << max(0, there.bit_length() - ROUNDED_BITS)
        for size in (need, there) if i.claim_fits else (there // step * step, there, need):
            if size > 0 and size != i.kv_cache_memory_bytes:
                yield Change({"kv_cache_memory_bytes": size}, replace(i, kv_cache_memory_bytes=size))


def _share(i: PlanInput) -> Iterator[Change]:
    if i.kv_cache_memory_bytes is None:
        need = i.fixed + (i.needed_blocks + 1) * i.block_bytes
        share = math.ceil(need / i.total * 100) / 100
        if i.utilization < share <= 1:
            yield Change({"gpu_memory_utilization": share}, replace(i, utilization=share))


def _chunk(i: PlanInput) -> Iterator[Change]:
    """Fewer tokens in a step: smaller intermediate tensors, and windows that hold less."""

    def fits(tokens: int) -> bool:
        return attempt(replace(i, max_chunk=tokens)) is not None

    if most := largest(fits, LEAST_CHUNK, i.max_chunk - 1):
        yield Change({"max_num_batched_tokens": most}, replace(i, max_chunk=most))


def _sequences(i: PlanInput) -> Iterator[Change]:
    """Fewer sequences at once: fewer rows of logits."""

    def fits(rows: int) -> bool:
        return attempt(replace(i, logit_rows=rows)) is not None

    if most := largest(fits, LEAST_SEQUENCES, i.logit_rows - 1):
        yield Change({"max_num_seqs": most}, replace(i, logit_rows=most))


def _length(i: PlanInput) -> Iterator[Change]:
    def fits(tokens: int) -> bool:
        return attempt(replace(i, max_model_len=tokens)) is not None

    if i.max_model_len is not None and (most := largest(fits, LEAST_LEN, i.max_model_len - 1)):
        yield Change({"max_model_len": most}, replace(i, max_model_len=most))


def _slots(i: PlanInput) -> Iterator[Change]:
    """Fewer expert slots, as long as they hold the experts of a token."""

    def fits(slots: int) -> bool:
        return attempt(replace(i, expert_slots=slots)) is not None

    least = max((unit.top_k for unit in i.units), default=1)
    if i.expert_slots and (most := largest(fits, least, i.expert_slots - 1)):
        yield Change({"expert_slots": most}, replace(i, expert_slots=most))


def _automatic_slots(i: PlanInput) -> Iterator[Change]:
    """As many slots as fit, maybe none, alone or with other changes."""
    if i.expert_slots:
        fewer = replace(i, expert_slots=None)
        yield Change({"expert_slots": None}, fewer)
        none = replace(i, expert_slots=0)
        for way in (_cache_bytes, _share, _chunk, _sequences, _length, _dtypes, _together, _offload):
            for change in way(none):
                yield Change({"expert_slots": None, **change.fields}, replace(change.inputs, expert_slots=None))


def _offload(i: PlanInput) -> Iterator[Change]:
    """Weights in host memory: as few layers as it takes, alone or with other changes. Where no length is asked for, it
    takes room for a useful one, if that can be."""
    tight = replace(i, max_chunk=min(i.max_chunk, LEAST_CHUNK), logit_rows=min(i.logit_rows, LEAST_SEQUENCES))
    small = {"max_num_batched_tokens": tight.max_chunk, "max_num_seqs": tight.logit_rows}
    useful = min(i.model_max_len, OFFLOAD_LEN)
    for length in (i.max_model_len,) if i.max_model_len else (useful, None):
        for start in (Change({}, i), *_dtypes(i), Change(small, tight)):
            for choice in choices(i.units, i.expert_slots or 0):
                moved = replace(start.inputs, offload=choice.nbytes)
                if attempt(replace(moved, max_model_len=length)) is not None:
                    yield Change({**start.fields, "cpu_offload_gb": gib_for(i.units, choice)}, moved)
                    break
    for start in (Change({}, i), Change(small, tight)):
        for change in _less_offload(start.inputs):
            yield Change({**start.fields, **change.fields}, change.inputs)


def _less_offload(i: PlanInput) -> Iterator[Change]:
    """As much offload as host memory holds, alone or with other changes."""
    if not i.units:
        return
    less = replace(i, offload=most_offload(i))
    fields = {"cpu_offload_gb": gib_for(i.units, less.offloaded) if less.offload else 0}
    yield Change(fields, less)
    for way in (_cache_bytes, _share, _chunk, _sequences, _length, _dtypes, _together):
        for change in way(less):
            yield Change({**fields, **change.fields}, change.inputs)


def _together(i: PlanInput) -> Iterator[Change]:
    """Several changes at once, where no single one is enough."""
    smaller = [Change({}, i), *_dtypes(i)]
    for first in smaller:
        for more in (_share, _cache_bytes, _chunk, _sequences, _length):
            if first.fields or more is _length:
                for change in more(first.inputs):
                    yield Change({**first.fields, **change.fields}, change.inputs)
    for first in smaller:
        chunk, rows = min(i.max_chunk, LEAST_CHUNK), min(i.logit_rows, LEAST_SEQUENCES)
        tight = replace(first.inputs, max_chunk=chunk, logit_rows=rows)
        small = {**first.fields, "max_num_batched_tokens": chunk, "max_num_seqs": rows}
        for change in (Change({}, tight), *_cache_bytes(tight), *_length(tight)):
            yield Change({**small, **change.fields}, change.inputs)


# What is said


def _above_the_model(inputs: PlanInput) -> CapacityError:
    """A longer request than the model was made for. What works may be shorter still than the model's own length, or
    take other changes as well."""
    own = replace(inputs, max_model_len=inputs.model_max_len)
    longest = Change({"max_model_len": inputs.model_max_len}, own)
    change = first_that_fits(way for ways in ([longest], _length(own)) for way in ways)
    if change is not None:
        fields, hint = dict(change.fields), f"{change.text()}, or auto"
    else:
        refused = _refusal(replace(inputs, max_model_len=None))
        fields = {"max_model_len": None, **refused.changes} if refused.changes else {}
        hint = f"--max-model-len auto{'' if refused.changes else ' and'} {refused.hint}"
    return CapacityError(
        "--max-model-len is above what the model was made for",
        have=f"{inputs.max_model_len} tokens",
        need=f"at most {inputs.model_max_len} tokens",
        hint=hint,
        changes=fields,
    )


def _no_host_memory(inputs: PlanInput) -> CapacityError:
    """What is to be offloaded is more than host memory holds."""
    free = inputs.host_free or 0
    change = first_that_fits(_less_offload(inputs))
    hint = "more free host memory, or smaller weights" if change is None else change.text()
    return CapacityError(
        "host memory does not hold the weights that are to be offloaded",
        have=f"{format_bytes(free)} free for them",
        need=f"{format_bytes(inputs.offloaded.nbytes)}, pinned",
        hint=hint,
        changes=None if change is None else change.fields,
    )


def _no_room(inputs: PlanInput, num_blocks: int) -> CapacityError:
    """Weights and activations leave no memory for the KV cache (of `num_blocks` ids at least)."""
    cache = num_blocks * inputs.block_bytes
    need = inputs.fixed + cache
    ways = (
        _slots, _cache_bytes, _share, _chunk, _sequences, _length, _dtypes, _together, _offload, _automatic_slots,
    )  # fmt: skip
    change = first_that_fits(change for way in ways for change in way(inputs))
    if change is None:
        hint = _more_memory(inputs)
    else:
        hint = change.text()
        if "max_num_batched_tokens" in change.fields:
            hint += f" (activations now take {format_bytes(inputs.activations)})"
    weights = ", ".join(f"{name} {format_bytes(size)}" for name, size in inputs.weights.items())
    working = format_bytes(inputs.activations + inputs.gathered)
    if inputs.offloaded.units:
        weights += f", of these in host memory {format_bytes(inputs.offloaded.nbytes)}"
    if inputs.offloaded.slots:
        weights += f", expert slots {format_bytes(inputs.offloaded.slots)}"
    return CapacityError(
        "no memory is left for the KV cache",
        have=f"{format_bytes(inputs.budget)} (total {format_bytes(inputs.total)}, free {format_bytes(inputs.free)}, "
        f"reserve {format_bytes(inputs.reserve)}{_asked(inputs)}{_neighbours(inputs)})",
        need=f"{format_bytes(need)} (weights {weights}; activations {working}; "
        f"graphs {format_bytes(inputs.graphs)}; KV cache {format_bytes(cache)})",
        hint=hint,
        changes=None if change is None else change.fields,
    )


def _asked(inputs: PlanInput) -> str:
    if inputs.kv_cache_memory_bytes is not None:
        return f", asked for a KV cache of {format_bytes(inputs.kv_cache_memory_bytes)}"
    return f", asked for a share of {inputs.utilization:g}"


def _neighbours(inputs: PlanInput) -> str:
    lines = inputs.neighbours()
    return f", also there: {', '.join(lines)}" if lines else ""


def _more_memory(inputs: PlanInput) -> str:
    """What no flag can do."""
    least = inputs.fixed + (inputs.blocks_for(inputs.max_model_len or LEAST_LEN) + 1) * inputs.block_bytes
    if inputs.kv_cache_memory_bytes is not None:
        least = max(least, inputs.fixed + (inputs.usable_blocks + 1) * inputs.block_bytes)
    missing = least + inputs.reserve - inputs.free
    share = 1.0 if inputs.kv_cache_memory_bytes is not None else inputs.utilization
    if 0 < missing <= inputs.others and least <= share * inputs.total:
        others = format_bytes(inputs.others)
        return f"{format_bytes(missing)} more free memory (others use {others}), or smaller weights"
    total = max(math.ceil(least / share), least + inputs.reserve)
    return f"a device with {format_bytes(total)}, or smaller weights"


def _tokens_held(inputs: PlanInput) -> int:
    """Tokens of the KV cache where the length asked for fits; else those of the longest that does, which needs less
    beside the cache."""
    if attempt(inputs) is not None:
        return inputs.most_tokens(inputs.usable_blocks)
    shorter = next(_length(inputs), None)
    return 0 if shorter is None else shorter.inputs.max_model_len or 0


def _too_long(inputs: PlanInput, fits: int) -> CapacityError:
    """The KV cache exists but is too small for one request of the length asked for."""
    asked = inputs.max_model_len or LEAST_LEN
    have, need = inputs.usable_blocks * inputs.block_bytes, inputs.needed_blocks * inputs.block_bytes
    held = {change.text(): _tokens_held(change.inputs) for change in _dtypes(inputs)}
    ways = (
        _slots, _dtypes, _cache_bytes, _share, _chunk, _sequences, _length, _together, _offload, _automatic_slots,
    )  # fmt: skip
    change = first_that_fits(change for way in ways for change in way(inputs))
    if change is None:
        hint = _more_memory(inputs)
    else:
        hint = change.text()
        if hint in held:
            hint += f" (holds {held[hint]} tokens)"
        if set(change.fields) == {"max_model_len"}:
            hint += ", or auto"
    short = [f"{name} holds only {tokens} tokens" for name, tokens in held.items() if tokens < asked]
    if short and len(short) == len(held):
        hint += "; even " + ", ".join(short)
    return CapacityError(
        f"--max-model-len {asked} does not fit into the KV cache"
        if inputs.max_model_len
        else "the KV cache is too small",
        have=f"{fits} tokens ({format_bytes(have)}, {have} bytes)",
        need=f"{asked} tokens ({format_bytes(need)}, {need} bytes)",
        hint=hint,
        changes=None if change is None else change.fields,
    )
