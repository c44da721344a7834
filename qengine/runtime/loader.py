"""Fills a model from a checkpoint in two steps: a plan on headers alone, then one module at a time.

`resolve` decides a scheme for every linear, balances needs against the checkpoint and knows all bytes before anything
is read. `load` then reads in file order and frees each module's file tensors before the next one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil
import torch

from qengine.errors import CapabilityError, CheckpointError
from qengine.layers.linear import Linear
from qengine.layers.module import FLOAT_CODES, Leaf
from qengine.plugin import DeviceInfo, LinearScheme, LinearSpec, TensorInfo, WeightQuant
from qengine.runtime.accounting import balance, first_names

Progress = Callable[[int, int, str], None]
"""Called after each module with (modules done, modules in all, its name)."""


class TensorSource(Protocol):
    """What `resolve` and `load` need of a checkpoint; dummy weights are one too."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> torch.Tensor: ...

    def file_position(self, name: str) -> tuple[str, int]: ...


@dataclass
class LoadPlan:
    """What will be loaded. `order` holds each leaf with the tensors it takes, in file order; `bytes_by_format` what
    stays resident; `schemes` the format of every linear by checkpoint name. Pure: nothing has been read yet."""

    source: TensorSource
    info: DeviceInfo
    order: list[tuple[Leaf, list[str]]]
    bytes_by_format: dict[str, int]
    schemes: dict[str, str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

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
    compact: bool = False,
) -> LoadPlan:
    """Give every linear its schemes and check everything that headers can tell.

    `quant` is asked first, then `dense`; each decides from the tensors that are there. `consumed` names tensors that
    somebody else reads (KV scales). `compact` takes the variants that keep fewer bytes and are slower. Raises
    CheckpointError for missing, wrong or contradictory tensors and CapabilityError for a format that this device
    cannot run.
    """
    modules = _by_module(source.tensors)
    schemes: dict[str, LinearScheme] = {}
    for leaf in leaves:
        if isinstance(leaf, Linear):
            chosen = [_scheme(leaf, spec, modules.get(spec.name, {}), quant, dense) for spec in leaf.specs]
            leaf.resolve(chosen)
            if compact:
                leaf.compact()
            schemes |= {spec.name: scheme for spec, scheme in zip(leaf.specs, chosen, strict=True)}
    books = balance((need for leaf in leaves for need in leaf.needs()), source.tensors, consumed)
    notes = books.notes + _capability_notes(schemes, info, dtype) + _unfused_notes(leaves)
    extra, zero_biases = _zero_biases(leaves, source, books.extra)
    if zero_biases:
        notes.append(f"{len(zero_biases)} all-zero bias tensors of linears without a bias are ignored")
    warnings = _grouped((name, text) for name, scheme in schemes.items() for text in scheme.notes)
    if extra:
        warnings.append(f"{len(extra)} tensor(s) in the checkpoint that this model does not use: {first_names(extra)}")
    total: Counter[str] = Counter()
    for leaf in leaves:
        total.update(leaf.resident_bytes(info))
    order = _file_order(leaves, source, books.take)
    formats = {name: scheme.format for name, scheme in schemes.items()}
    return LoadPlan(source, info, order, dict(total), formats, notes, warnings)


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """module name -> leaf name -> tensor."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    return modules


def _scheme(
    leaf: Linear, spec: LinearSpec, tensors: Mapping[str, TensorInfo], quant: WeightQuant | None, dense: WeightQuant
) -> LinearScheme:
    try:
        stays_dense = not leaf.quantizable and "weight" in tensors and tensors["weight"].dtype in FLOAT_CODES
        scheme = quant.scheme_for(spec, tensors) if quant is not None and not stays_dense else None
        scheme = scheme or dense.scheme_for(spec, tensors)
        if scheme is None:
            # The file holds nothing that anybody reads under this name: plan it as 16-bit, so that the balance
            # reports its weight as missing together with all others.
            absent = TensorInfo(f"{spec.name}.weight", "F16", (spec.out_features, spec.in_features))
            scheme = dense.scheme_for(spec, {"weight": absent})
    except ValueError as e:
        raise CheckpointError(f"{spec.name}: {e}") from e
    if scheme is None:
        raise CheckpointError(f"{spec.name}: no weight format reads it", have=", ".join(tensors) or "no tensors")
    return scheme


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


def _grouped(notes: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each text, with the modules that it is about."""
    modules: dict[str, list[str]] = {}
    for name, text in notes:
        modules.setdefault(text, []).append(name)
    return [
        f"{text} ({len(names)} module{'s' * (len(names) > 1)}: {first_names(names, 3)})"
        for text, names in modules.items()
    ]


def _unfused_notes(leaves: Sequence[Leaf]) -> list[str]:
    mixed = [leaf.name for leaf in leaves if isinstance(leaf, Linear) and len(leaf.runs()) > 1]
    if not mixed:
        return []
    return [f"{len(mixed)} fused modules run in parts, because their shards differ in format: {first_names(mixed, 3)}"]


def _zero_biases(
    leaves: Sequence[Leaf], source: TensorSource, extra: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split off extra biases of linears that have none by architecture: zeros are harmless (some quantisers write
    them), anything else means that the config describes another model."""
    names = {f"{spec.name}.bias" for leaf in leaves if isinstance(leaf, Linear) for spec in leaf.specs}
    biases = [name for name in extra if name in names]
    for name in biases:
        if source.read(name).count_nonzero():
            raise CheckpointError(
                f"{name} is not zero, but the model has no bias there", hint="a config.json that fits the weights"
            )
    return [name for name in extra if name not in names], biases


def _file_order(leaves: Sequence[Leaf], source: TensorSource, take: Collection[str]) -> list[tuple[Leaf, list[str]]]:
    """Leaves sorted by where their first tensor lies. A leaf that needs nothing of its own (a tied head) comes last."""
    order = []
    for leaf in leaves:
        names = sorted({n for n, _ in leaf.needs() if n in take}, key=source.file_position)
        order.append((leaf, names))
    return sorted(order, key=lambda item: (not item[1], source.file_position(item[1][0]) if item[1] else ("", 0)))


def load(plan: LoadPlan, progress: Progress | None = None) -> LoadReport:
    """Read, repack and place one module at a time; peak host memory is about the model plus one module.

    Raises CheckpointError with the list of all modules whose data a format refuses.
    """
    start = time.perf_counter()
    process = psutil.Process()
    peak = process.memory_info().rss
    refused: list[str] = []
    for done, (leaf, names) in enumerate(plan.order, 1):
        tensors = {name: plan.source.read(name) for name in names}
        peak = max(peak, process.memory_info().rss)
        try:
            leaf.load(tensors)
        except ValueError as e:
            own = [spec.name for spec in leaf.specs] if isinstance(leaf, Linear) else []
            refused.append(str(e) if any(name in str(e) for name in own) else f"{leaf.name}: {e}")
        peak = max(peak, process.memory_info().rss)
        tensors.clear()
        if progress is not None:
            progress(done, len(plan.order), leaf.name)
    if refused:
        raise CheckpointError(f"{len(refused)} module(s) hold data that cannot be used: {first_names(refused)}")
    sizes = _measured_bytes([leaf for leaf, _ in plan.order], plan.info)
    ops = [op for leaf, _ in plan.order if isinstance(leaf, Linear) for op in leaf.ops]
    warnings = _grouped(note for op in ops for note in op.notes)
    report = LoadReport(time.perf_counter() - start, sizes, Counter(op.kernel for op in ops), peak, warnings)
    if abs(report.total_bytes - plan.total_bytes) > 0.02 * plan.total_bytes:
        report.warnings.append(
            f"weights take {report.total_bytes} bytes where {plan.total_bytes} were planned: "
            f"planned {plan.bytes_by_format}, loaded {sizes}"
        )
    return report


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
