"""The check that goes the whole way: a checkpoint in the plugin's format through the loader."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from qengine.conformance.kit import NotApplicable, Registry, need
from qengine.conformance.places import Place
from qengine.conformance.toy import LINEARS, other_tensors, write_folder
from qengine.conformance.weight_numbers import ROUNDED
from qengine.conformance.weight_subject import WeightSubject, weight_of
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.models.registry import build_model
from qengine.plugin import LinearSpec, Quantizer, WeightQuant
from qengine.plugin.discovery import load_plugin
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.loader import load, resolve
from qengine.runtime.model_config import load_config
from qengine_kernels.testing import relative_error

CHECKPOINT = Registry()


@CHECKPOINT.add("checkpoint")
def checkpoint(subject: WeightSubject) -> None:
    """A quantised one-layer model loads: tensors balance, bytes are as planned, fused modules multiply rightly."""
    if subject.kernels is not None:
        raise NotApplicable("the format's own check, not that of its kernels")
    quantizer = next((q for q in subject.quantizers[::-1] if accepts_all(q)), None)
    if quantizer is None:
        raise NotApplicable("no quantizer, or it leaves linears of the toy model as they are")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meaning = write_quantised(folder, subject.reader(quantizer.config([])), quantizer)
        for place in subject.places:
            dtype, limit = place.limits[0]
            if subject.stored[0].runs_at(place, dtype):
                _load(subject, folder, place, dtype, limit, meaning)


def accepts_all(quantizer: Quantizer) -> bool:
    return all(quantizer.accepts(LinearSpec(name, k, n)) is None for name, (n, k) in LINEARS.items())


def write_quantised(folder: Path, plugin: type[WeightQuant], quantizer: Quantizer) -> dict[str, torch.Tensor]:
    """The toy model with every linear of its layer quantised; returns what `dequantize` says of each."""
    config = quantizer.config(["lm_head"])
    reader = plugin.parse(config)
    tensors, meaning = other_tensors(), {}
    for i, (name, (n, k)) in enumerate(LINEARS.items()):
        spec = LinearSpec(name, k, n)
        made = quantizer.quantize(spec, weight_of(spec, seed=i))
        tensors |= {f"{name}.{leaf}": t for leaf, t in made.items()}
    write_folder(folder, tensors, config)
    source = Checkpoint.open(folder)
    for name, (n, k) in LINEARS.items():
        spec, prefix = LinearSpec(name, k, n), f"{name}."
        own = {full.removeprefix(prefix): full for full in source.tensors if full.startswith(prefix)}
        scheme = reader.scheme_for(spec, {leaf: source.tensors[full] for leaf, full in own.items()})
        need(scheme is not None, f"scheme_for says None to {name} of a checkpoint that its quantizer made")
        assert scheme is not None
        meaning[name] = scheme.dequantize(spec, {leaf: source.read(full) for leaf, full in own.items()})
    return meaning


def _load(
    subject: WeightSubject,
    folder: Path,
    place: Place,
    dtype: torch.dtype,
    limit: float,
    meaning: dict[str, torch.Tensor],
) -> None:
    source = Checkpoint.open(folder)
    assert source.quant is not None
    quant = subject.reader(source.quant.config).parse(source.quant.config)
    dense = load_plugin("weight", "dense").parse(None)
    ctx = ModelContext(load_config(source), place.device, place.info, dtype, torch.float32, max_model_len=64)
    model = build_model(ctx)
    report = load(resolve(model.leaves, source, quant, dense, place.info, dtype))
    where = f"the toy model on {place} in {str(dtype).removeprefix('torch.')}"
    warnings = [w for w in report.warnings if not w.startswith("weights take")]  # bytes have a check of their own
    need(not warnings, f"{where}: {warnings[:1]}")
    for leaf in model.leaves:
        if isinstance(leaf, Linear) and leaf.specs[0].name in meaning:
            want_weight = torch.cat([meaning[spec.name] for spec in leaf.specs])
            x = torch.randn(1, leaf.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
            allowed = limit + ROUNDED if any(op.rounds_activations for op in leaf.ops) else limit
            error = relative_error(leaf(x.to(place.device)), x.float() @ want_weight.T)
            need(error <= allowed, f"{where}: {leaf.name} is off by {error:.2g}, need <= {allowed:.2g}")
