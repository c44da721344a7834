"""What `qengine inspect` finds out about a checkpoint from its headers: all of it rather than the first fault."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qengine.config import EngineConfig
from qengine.errors import CapabilityError, CheckpointError, ConfigError, UserError
from qengine.layers.linear import Linear, whole
from qengine.layers.module import Leaf, ModelContext
from qengine.models.model import Model
from qengine.models.registry import build_model
from qengine.plugin import LinearScheme
from qengine.plugin.discovery import load_plugin
from qengine.runtime import report
from qengine.runtime.decide import Built, decide
from qengine.runtime.device_matrix import Answer, Target, kv_answers, kv_plugins, scheme_answers, targets
from qengine.runtime.header_checkpoint import HeaderCheckpoint
from qengine.runtime.kv_beside import choose_sidecar
from qengine.runtime.kv_dtypes import KVDtypes, asked_kv_dtypes, block_bytes_line, choose_kv_dtypes
from qengine.runtime.kv_scales import ResolvedScales, resolve_kv_scales
from qengine.runtime.kv_sidecar import KVSidecar
from qengine.runtime.model_config import config_doubts, load_config
from qengine.runtime.model_texts import ModelTexts, read_settings
from qengine.runtime.quant_select import DENSE, QuantChoice, select_quant
from qengine.runtime.safetensors_file import tensor_bytes
from qengine.runtime.survey import Survey, survey

REFUSED = "refused"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class ModuleGroup:
    """Linears that differ in nothing but the numbers in their names: `modules` has a * for each number, `numbers` the
    values of the first one."""

    scheme: str
    modules: str
    numbers: str
    count: int
    out_features: int
    in_features: int


@dataclass
class Sizes:
    """Bytes of one scheme: in the file, and kept on a GPU and on a CPU."""

    file: int = 0
    gpu: int = 0
    cpu: int = 0


@dataclass
class Inspection:
    """`problems` keep the checkpoint from being served; `contradictions` do not; `unchecked` would need data."""

    model: str
    model_type: str = ""
    format: str = ""
    tensors: int = 0
    file_bytes: int = 0
    file_dtypes: dict[str, int] = field(default_factory=dict)
    modules: list[ModuleGroup] = field(default_factory=list)
    bytes: dict[str, Sizes] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    kv_scales: dict[str, list[str]] = field(default_factory=dict)
    kv_notes: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    kernels: dict[str, list[Answer]] = field(default_factory=dict)
    kv_kernels: dict[str, list[Answer]] = field(default_factory=dict)
    plan: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    texts_refused: bool = False

    @property
    def servable(self) -> bool:
        return not self.problems

    def problem(self, error: Exception) -> None:
        text = " ".join(str(error).split())
        if text not in self.problems:
            self.problems.append(text)


def inspect_folder(config: EngineConfig) -> Inspection:
    """Look at the folder `config.model` with the options that serving would get. No tensor's data is read, and faults
    of the checkpoint end up in `problems` instead of being raised."""
    assert config.model is not None
    out = Inspection(config.model)
    try:
        checkpoint = HeaderCheckpoint.open(config.model)
        assert isinstance(checkpoint, HeaderCheckpoint)
    except CheckpointError as e:
        out.problem(e)
        return out
    _files(out, checkpoint)
    try:
        choice = select_quant(config.quantization, checkpoint.quant)
        out.format = choice.reason
    except UserError as e:
        out.problem(e)
        return out
    _copy(out, config.quantization, checkpoint)
    _texts(out, config)
    try:
        _model(out, config, checkpoint, choice)
    except UserError as e:
        out.problem(e)
        return out
    if out.servable:
        _plan(out, config)
    return out


def _copy(out: Inspection, asked: str | None, checkpoint: HeaderCheckpoint) -> None:
    """What serving would make of a 16-bit checkpoint first."""
    if asked in (None, DENSE) or not checkpoint.is_dense():
        return
    plugin = load_plugin("weight", asked)
    if plugin.quantizes_at_load:
        return
    if plugin.quantizer() is None:
        out.problem(ConfigError(f"{asked} weights cannot be made from this 16-bit checkpoint"))
    else:
        out.notes.append(f"serving makes a copy with {asked} weights first; this is about the checkpoint as it is")


def _texts(out: Inspection, config: EngineConfig) -> None:
    """A tokenizer can be given beside the model, so its lack is a note; what the model's own files say of texts cannot
    be replaced."""
    try:
        read_settings(config.model or "")
    except UserError as e:
        out.problem(e)
        return
    folder = config.tokenizer or config.model
    if folder is None or not Path(folder).is_dir():
        return
    try:
        ModelTexts.read(config.model or "", folder, trust_remote_code=config.trust_remote_code)
    except UserError as e:
        out.texts_refused = True
        out.notes.append(f"serving would refuse its texts: {e}")


def _files(out: Inspection, checkpoint: HeaderCheckpoint) -> None:
    out.model_type = str(checkpoint.raw_config.get("model_type"))
    out.tensors, out.file_bytes = len(checkpoint.tensors), checkpoint.nbytes
    out.stale = checkpoint.stale
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += tensor_bytes(info)
    out.file_dtypes = dict(sizes.most_common())
    # What find_quant_config noted: places of one config that disagree.
    out.contradictions += [note for note in checkpoint.notes if note not in checkpoint.stale]


def _model(out: Inspection, config: EngineConfig, checkpoint: HeaderCheckpoint, choice: QuantChoice) -> None:
    """Build the model for a GPU and for a CPU, and compare each linear and tensor with the headers."""
    known = len(checkpoint.notes)
    hf = load_config(checkpoint, trust_remote_code=config.trust_remote_code)
    doubts = config_doubts(hf, checkpoint)
    out.notes += doubts
    tied = list(checkpoint.wanted)
    if tied:
        out.unchecked.append(f"whether {' and '.join(tied)} are equal: assumed, as config.json says")
    else:
        out.notes += [note for note in checkpoint.notes[known:] if note not in doubts]
    devices = targets(config.dtype, checkpoint.dtype)
    usable = [d for d in devices if d.dtype is not None]
    if not usable:
        raise CapabilityError(devices[0].problem)
    gpus = [d for d in usable if d.info.type == "cuda"]
    cpus = [d for d in usable if d.info.type == "cpu"]
    found: Survey | None = None
    for kind, device in (("gpu", gpus[-1:]), ("cpu", cpus)):
        if not device:
            continue
        model = _build(hf, config, device[0])
        if found is None:
            scales = _scales(out, config, checkpoint, model)
        found = survey(model.leaves, checkpoint, choice.quant, choice.dense, scales.consumed, checkpoint)
        _sizes(out, checkpoint, model.leaves, found, kind, device[0])
    assert found is not None
    if found.unquantised:
        out.format = choice.over_plain_weights().reason
    _compare(out, checkpoint, found)
    out.modules = module_groups(model.leaves, found)
    out.kernels = scheme_answers(found.schemes.values(), devices)
    out.kv_kernels = kv_answers(model.attention[0].spec, devices) if model.attention else {}


def _build(hf: object, config: EngineConfig, device: Target) -> Model:
    assert device.dtype is not None
    longest = config.max_model_len or 1 << 30
    return build_model(ModelContext(hf, torch.device("cpu"), device.info, device.dtype, torch.float32, longest))


def _compare(out: Inspection, checkpoint: HeaderCheckpoint, found: Survey) -> None:
    out.missing, out.wrong, out.extra = found.books.missing, found.books.wrong, [*found.unread, *found.extra]
    out.contradictions += found.contradictions()
    out.notes += found.books.notes
    for error in found.problems():
        out.problem(error)
    if found.zero_biases:
        out.unchecked.append(f"whether {len(found.zero_biases)} biases that the model does not have are all zero")
    if quantised := [n for n, s in found.schemes.items() if s.format != "16-bit"]:
        out.unchecked.append(f"values of scales, zero points and group indices of {len(quantised)} quantised modules")


def _scales(out: Inspection, config: EngineConfig, checkpoint: HeaderCheckpoint, model: Model) -> ResolvedScales:
    """The KV scales for the chosen KV dtype; the report shows those that a dtype with scales would get."""
    settings = checkpoint.quant.config if checkpoint.quant else None
    sidecar = _sidecar(out, config, checkpoint)
    kv_map = asked_kv_dtypes(config.kv_cache_dtype, config.kv_cache_dtype_skip_layers)
    chosen = choose_kv_dtypes(kv_map, model.attention, sidecar)
    before = len(checkpoint.wanted)
    taking = chosen if chosen.scaled else _with_scales(model)
    if taking is not None:
        try:
            own = sidecar if chosen.scaled else choose_sidecar(config.kv_scales, taking.name, checkpoint)[0]
            shown = resolve_kv_scales(checkpoint, model.attention, taking, settings, own)
            for name, found in shown.scales.items():
                out.kv_scales.setdefault(found.source, []).append(name)
            out.kv_notes += shown.notes + shown.warnings
        except UserError as e:
            out.kv_notes.append(f"--kv-dtype {taking.name} is refused: {e}")
    if asked := checkpoint.wanted[before:]:
        out.unchecked.append(f"values of {len(asked)} KV scales and zero points: finite, positive, symmetric, agreeing")
    return resolve_kv_scales(checkpoint, model.attention, chosen, settings, sidecar)


def _sidecar(out: Inspection, config: EngineConfig, checkpoint: HeaderCheckpoint) -> KVSidecar | None:
    """A fault of the calibration file hides none of the model."""
    try:
        sidecar, notes = choose_sidecar(config.kv_scales, config.kv_cache_dtype, checkpoint)
    except UserError as e:
        out.problem(e)
        return None
    out.kv_notes += notes
    return sidecar


def _with_scales(model: Model) -> KVDtypes | None:
    """The first installed KV dtype that takes every kind of scale."""
    found = [plugin for _, plugin in kv_plugins() if plugin.max_value is not None]
    best = max(found, key=lambda plugin: "head" in plugin.scale_granularity, default=None)
    return None if best is None else KVDtypes.uniform(model.attention, best)


def _sizes(
    out: Inspection, checkpoint: HeaderCheckpoint, leaves: Iterable[Leaf], found: Survey, kind: str, device: Target
) -> None:
    """Add what every leaf keeps on a device (and, the first time, what it takes in the file) by scheme."""
    first = not any(sizes.file for sizes in out.bytes.values())
    counted: set[str] = set()

    def add(label: str, names: Iterable[str], kept: int) -> None:
        fresh = set(names) - counted if first else set()
        if not kept and not fresh:  # a tied embedding's bytes are its head's
            return
        sizes = out.bytes.setdefault(label, Sizes())
        setattr(sizes, kind, getattr(sizes, kind) + kept)
        counted.update(fresh)
        sizes.file += sum(tensor_bytes(checkpoint.tensors[name]) for name in fresh)

    for leaf in leaves:
        if not isinstance(leaf, Linear):
            names = [name for name, _ in leaf.needs() if name in found.books.take]
            kept = leaf.resident_bytes(device.info)
            add(next(iter(kept), "other"), names, sum(kept.values()))
            continue
        if any(spec.name in found.refused for spec in leaf.specs):
            add(REFUSED, [n for n in checkpoint.tensors if n.rpartition(".")[0] in {s.name for s in leaf.specs}], 0)
            continue
        assert device.dtype is not None
        for scheme, specs in leaf.runs():
            names = [f"{spec.name}.{need.leaf}" for spec in specs for need in scheme.tensors(spec)]
            kept_bytes = scheme.resident_bytes(whole(specs), device.info, device.dtype)
            add(scheme.format, [name for name in names if name in found.books.take], kept_bytes)


def module_groups(leaves: Iterable[Leaf], found: Survey) -> list[ModuleGroup]:
    """The linears in order, those alike in one line."""
    groups: dict[tuple[str, str, int, int], list[str]] = {}
    for leaf in leaves:
        for spec in leaf.specs if isinstance(leaf, Linear) else ():
            scheme: LinearScheme | None = found.schemes.get(spec.name)
            label = REFUSED if scheme is None else scheme.format
            key = (label, NUMBER.sub("*", spec.name), spec.out_features, spec.in_features)
            groups.setdefault(key, []).append(spec.name)
    out = []
    for (label, pattern, n, k), names in groups.items():
        numbers = sorted({int(m[0]) for name in names if (m := NUMBER.search(name))})
        out.append(ModuleGroup(label, pattern, ranges(numbers), len(names), n, k))
    return out


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _plan(out: Inspection, config: EngineConfig) -> None:
    """How it would run on this machine; what `serve` would refuse here is a problem."""
    try:
        checkpoint = HeaderCheckpoint.open(Path(config.model or ""))
        b = decide(config, checkpoint)
    except UserError as e:
        out.problem(e)
        return
    out.plan = plan_lines(b)
    out.notes += [line for line in b.load_plan.notes if line not in out.notes]


def plan_lines(b: Built) -> list[str]:
    memory = b.memory
    return [
        f"Device: {b.info.type} {b.info.name}".rstrip(),
        f"Compute dtype: {str(b.dtype).removeprefix('torch.')} ({b.dtype_reason})",
        f"KV cache: {b.kv.name}",
        block_bytes_line(b.layouts),
        "Memory plan: " + "; ".join(f"{what} {report.gib(size)}" for what, size in memory.items()),
        *report.kv_lines(
            memory.kv_tokens, memory.max_model_len, memory.concurrency(memory.max_model_len), b.device.type == "cuda"
        ),
        *b.notes,
    ]


def as_json(found: Inspection) -> Mapping[str, object]:
    """Plain values; `servable` first."""
    return {"servable": found.servable, **dataclasses.asdict(found)}
