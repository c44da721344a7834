"""Fills a model from a checkpoint in two steps: a plan on headers alone, then one module at a time.

`resolve` decides a scheme for every linear, balances needs against the checkpoint and knows all bytes before anything
is read. `load` then reads in file order and frees each module's file tensors before the next one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from qengine.errors import CapabilityError, CheckpointError
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import DeviceInfo, LinearScheme, WeightQuant
from qengine.runtime.accounting import first_names
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.host_memory import Trimmer
from qengine.runtime.kernel_choice import prefer_kernels
from qengine.runtime.offload_store import OffloadStore
from qengine.runtime.survey import TensorSource, grouped, survey

Progress = Callable[[int, int, str], None]
"""Called after each module with (modules done, modules in all, its name)."""


@dataclass
class LoadPlan:
    """What will be loaded. `order` holds each leaf with the tensors it takes, in file order; `bytes_by_format` what
    stays resident; `schemes` the format of every linear by checkpoint name; `unquantised`: all are 16-bit, and the
    checkpoint's config says otherwise. Pure: nothing has been read yet."""

    source: TensorSource
    info: DeviceInfo
    order: list[tuple[Leaf, list[str]]]
    bytes_by_format: dict[str, int]
    schemes: dict[str, str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unquantised: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_format.values())


@dataclass
class LoadReport:
    """What was loaded: seconds, resident bytes by format (measured on the buffers), number of linear ops by kernel,
    and the process's largest resident set while loading."""

    seconds: float
    bytes_by_format: dict[str, int]
    kernels: Counter[str]
    peak_host_bytes: int
    warnings: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_format.values())


def resolve(
    leaves: Sequence[Leaf],
    source: TensorSource,
    quant: WeightQuant | None,
    dense: WeightQuant,
    info: DeviceInfo,
    dtype: torch.dtype,
    *,
    consumed: Collection[str] = (),
    about: Checkpoint | None = None,
    compact: bool = False,
    rounded_head: bool = False,
) -> LoadPlan:
    """Give every linear its schemes and check everything that headers can tell.

    `quant` is asked first, then `dense`; each decides from the tensors that are there. `consumed` names tensors that
    somebody else reads (KV scales); `about` is the checkpoint whose config is held against the tensors. `compact` takes
    the variants that keep fewer bytes and are slower; without it, `rounded_head` takes the output layer's variant that
    is faster for few rows, if weights are quantised. Raises CheckpointError for missing, wrong or contradictory tensors
    and CapabilityError for a format that this device cannot run.
    """
    found = survey(leaves, source, quant, dense, consumed, about)
    if problems := found.problems():
        raise problems[0]
    if compact:
        for leaf in leaves:
            if isinstance(leaf, Linear):
                leaf.compact()
    readers = [dense.name] if quant is None else [quant.name, dense.name]
    notes, warnings = prefer_kernels(leaves, found.schemes, readers, info, dtype)
    # A config may name a format for its KV scales alone: such weights are 16-bit like all others.
    rounded = _round_heads(leaves) if rounded_head and found.quantised and not compact else []
    notes += rounded + found.books.notes + _capability_notes(found.schemes, info, dtype) + _unfused_notes(leaves)
    if found.zero_biases:
        notes.append(f"{len(found.zero_biases)} all-zero bias tensors of linears without a bias are ignored")
    warnings += found.contradictions()
    if found.extra:
        names = first_names(found.extra)
        warnings.append(f"{len(found.extra)} tensor(s) in the checkpoint that this model does not use: {names}")
    total: Counter[str] = Counter()
    for leaf in leaves:
        total.update(leaf.resident_bytes(info))
    order = _file_order(leaves, source, found.books.take)
    formats = {name: scheme.format for name, scheme in found.schemes.items()}
    return LoadPlan(source, info, order, dict(total), formats, notes, warnings, bool(found.unquantised))


def _capability_notes(schemes: Mapping[str, LinearScheme], info: DeviceInfo, dtype: torch.dtype) -> list[str]:
    """Raise CapabilityError for the first scheme that is refused; one note for each that is emulated."""
    notes: list[str] = []
    asked: set[tuple[object, ...]] = set()
    for name, scheme in schemes.items():
        if scheme.key in asked:
            continue
        asked.add(scheme.key)
        answer = scheme.capability(info, dtype)
        device = info.name or info.type
        if not answer:
            raise CapabilityError(
                f"{scheme.format} (first in {name}) does not run on {device} with "
                f"{str(dtype).removeprefix('torch.')}: {answer.reason}"
            )
        if answer.kind == "emulated" and (note := f"{scheme.format} is emulated: {answer.reason}") not in notes:
            notes.append(note)
    return notes


def _round_heads(leaves: Sequence[Leaf]) -> list[str]:
    """Give output layers their variant for few rows; a note for each that has one."""
    notes = []
    for leaf in leaves:
        if isinstance(leaf, Linear) and leaf.output_layer:
            before = leaf.schemes
            leaf.few_rows()
            if leaf.schemes != before:
                notes.append(f"{leaf.name}: {leaf.schemes[0].format} (--no-lm-head-int8: always exact)")
    return notes


def _unfused_notes(leaves: Sequence[Leaf]) -> list[str]:
    mixed = [leaf.name for leaf in leaves if isinstance(leaf, Linear) and len(leaf.runs()) > 1]
    if not mixed:
        return []
    return [f"{len(mixed)} fused modules run in parts, because their shards differ in format: {first_names(mixed, 3)}"]


def _file_order(leaves: Sequence[Leaf], source: TensorSource, take: Collection[str]) -> list[tuple[Leaf, list[str]]]:
    """Leaves sorted by where their first tensor lies. A leaf that needs nothing of its own (a tied head) comes last."""
    order = []
    for leaf in leaves:
        names = sorted({n for n, _ in leaf.needs() if n in take}, key=source.file_position)
        order.append((leaf, names))
    return sorted(order, key=lambda item: (not item[1], source.file_position(item[1][0]) if item[1] else ("", 0)))


def load(plan: LoadPlan, progress: Progress | None = None, store: OffloadStore | None = None) -> LoadReport:
    """Read, repack and place one module at a time; peak host memory is about the model plus one module. `store` takes
    the layers that are to live in host memory, each as soon as it is complete; its modules are loaded in a row.

    Raises CheckpointError with the list of all modules whose data a format refuses.
    """
    start = time.perf_counter()
    process = psutil.Process()
    peak = process.memory_info().rss
    refused: dict[str, list[str]] = {}
    give_back = Trimmer()
    for done, (leaf, names) in enumerate(_in_a_row(plan.order, store), 1):
        tensors = {name: plan.source.read(name) for name in names}
        peak = max(peak, process.memory_info().rss)
        try:
            leaf.load(tensors)
        except ValueError as e:
            module, reason = _blamed(leaf, str(e))
            refused.setdefault(reason, []).append(module)
        else:
            if store is not None:
                store.loaded(leaf)
        peak = max(peak, process.memory_info().rss)
        tensors.clear()
        give_back()
        if progress is not None:
            progress(done, len(plan.order), leaf.name)
    if refused:
        count = sum(map(len, refused.values()))
        told = [f"{first_names(own)}: {reason}" if any(own) else reason for reason, own in refused.items()]
        raise CheckpointError(f"{count} module(s) hold data that cannot be used: {first_names(told, between='; ')}")
    sizes = _measured_bytes([leaf for leaf, _ in plan.order], plan.info)
    ops = [op for leaf, _ in plan.order if isinstance(leaf, Linear) for op in leaf.ops]
    warnings = grouped(note for op in ops for note in op.notes)
    report = LoadReport(time.perf_counter() - start, sizes, Counter(op.kernel for op in ops), peak, warnings)
    if abs(report.total_bytes - plan.total_bytes) > 0.02 * plan.total_bytes:
        report.warnings.append(
            f"weights take {report.total_bytes} bytes where {plan.total_bytes} were planned: "
            f"planned {plan.bytes_by_format}, loaded {sizes}"
        )
    return report


def _blamed(leaf: Leaf, text: str) -> tuple[str, str]:
    """The module that an error is about and the reason alone, which others may share; no module where the text names
    its own within."""
    own = [spec.name for spec in leaf.specs] if isinstance(leaf, Linear) else []
    for name in own:
        if text.startswith(f"{name}: "):
            return name, text.removeprefix(f"{name}: ")
    return ("" if any(name in text for name in own) else leaf.name), text


def _in_a_row(
    order: Sequence[tuple[Leaf, list[str]]], store: OffloadStore | None
) -> Sequence[tuple[Leaf, list[str]]]:
    """File order, but the modules of a layer that goes to host memory follow its first one."""
    if store is None:
        return order
    layers = [store.position(leaf) for leaf, _ in order]
    first = {layer: i for i, layer in reversed(list(enumerate(layers)))}
    at = [i if layer is None else first[layer] for i, layer in enumerate(layers)]
    return [order[i] for i in sorted(range(len(order)), key=lambda i: (at[i], i))]


def _measured_bytes(leaves: Sequence[Leaf], info: DeviceInfo) -> dict[str, int]:
    """Bytes of all buffers by the same formats as the plan; shared storage counts once."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()

    def add(label: str, buffers: Mapping[str, torch.Tensor]) -> None:
        for t in buffers.values():
            # Opaque layouts (oneDNN's prepacked weights) have no address and are never shared.
            place = t.data_ptr() if t.layout is torch.strided else id(t)
            if place not in seen:
                seen.add(place)
                sizes[label] += t.numel() * t.element_size()

    for leaf in leaves:
        if isinstance(leaf, Linear):
            for (scheme, _), op in zip(leaf.runs(), leaf.ops, strict=True):
                add(scheme.format, op.buffers())
        else:
            add(next(iter(leaf.resident_bytes(info)), "other"), leaf.buffers())
    return dict(sizes)
