"""Checks of what a format says about itself and its files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from qengine.conformance.kit import CheckFailed, NotApplicable, Registry, need
from qengine.conformance.weight_numbers import ROUNDED, product
from qengine.conformance.weight_subject import PLAIN, Stored, WeightSubject, inputs, weight_of
from qengine.plugin import CalibratedQuantizer, DeviceInfo, InputStats, LinearSpec
from qengine.plugin.discovery import list_plugins
from qengine.plugin.version import accepts_contract, written_for
from qengine_kernels.launch import SHARED_MEMORY
from qengine_kernels.testing import relative_error

FORMAT = Registry()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORST_ROUNDING = 0.6
"""Relative error of a weight that the poorest format (2 bits, a scale a row) may make; a wrong scale is far above."""


@FORMAT.add("contract")
def contract(subject: WeightSubject) -> None:
    """A name, the contract version as a literal, the methods that it reads; unreadable configs raise ValueError."""
    plugin: Any = subject.kernels or subject.plugin
    need(isinstance(getattr(plugin, "name", None), str) and bool(plugin.name), "`name` is missing")
    stated = getattr(plugin, "contract", None)
    need(accepts_contract(stated), f"`contract` states {written_for(stated)}")
    if subject.kernels is not None:
        need(isinstance(plugin.priority, int), f"`priority` is {plugin.priority!r}; need: a number")
        return
    for config in (None, {}, {"quant_method": plugin.name, "bits": "many"}):
        try:
            plugin.parse(config)
        except ValueError:
            continue
        except Exception as e:
            raise CheckFailed(f"parse({config}) raises {type(e).__name__}, not ValueError: {e}") from e
    first = subject.stored[0]
    quant = first.plugin.parse(first.config)
    need(quant.scheme_for(PLAIN, {}) is None, "scheme_for takes a module of which the file holds nothing")


@FORMAT.add("headers")
def headers(subject: WeightSubject) -> None:
    """`tensors` lists what the file holds, with shapes, dtypes and dims; equal headers have equal keys."""
    for own in subject.stored:
        needs = {n.leaf: n for n in own.scheme.tensors(own.spec)}
        missing = [leaf for leaf, n in needs.items() if n.required and leaf not in own.headers]
        need(not missing, f"{own}: tensors() asks for {', '.join(missing)}, the file holds {', '.join(own.headers)}")
        extra = sorted(own.headers.keys() - needs.keys())
        need(not extra, f"{own}: tensors() does not know {', '.join(extra)} that the file holds")
        for leaf, info in own.headers.items():
            n = needs[leaf]
            fits = len(n.shape) == len(info.shape) and all(
                a is None or a == b for a, b in zip(n.shape, info.shape, strict=True)
            )
            need(fits, f"{own}: {leaf} has shape {list(info.shape)}, tensors() says {list(n.shape)}")
            need(info.dtype in n.dtypes, f"{own}: {leaf} is {info.dtype}, tensors() says {' | '.join(n.dtypes)}")
            for dim in (n.output_dim, n.input_dim):
                need(dim is None or dim < len(n.shape), f"{own}: {leaf} has no dimension {dim}")
        again = replace(own)
        need(again.scheme.key == own.scheme.key and hash(again.scheme.key) == hash(own.scheme.key),
             f"{own}: the same headers give another key")  # fmt: skip
        need(bool(own.scheme.format), f"{own}: `format` is empty")


@FORMAT.add("capability")
def capability(subject: WeightSubject) -> None:
    """Answers for every chip and dtype, without a GPU, the same each time; refusals and emulations say why."""
    claimed, refusal = 0, ""
    for own in subject.stored[:2]:
        for info in devices():
            for dtype in DTYPES:
                answer = own.scheme.capability(info, dtype)
                where = f"{own} on {info.name} in {str(dtype).removeprefix('torch.')}"
                need(own.scheme.capability(info, dtype) == answer, f"{where}: capability changes between calls")
                need(answer.kind == "native" or bool(answer.reason), f"{where}: {answer.kind} without a reason")
                need(not (info.sm == 75 and dtype is torch.bfloat16 and answer), f"{where}: sm_75 has no bfloat16")
                claimed += bool(answer)
                refusal = refusal if answer else answer.reason
                if answer:
                    size = own.scheme.resident_bytes(own.spec, info, dtype)
                    need(isinstance(size, int) and size > 0, f"{where}: resident_bytes says {size!r}")
    if not claimed and subject.kernels is not None:
        raise NotApplicable(f"the kernels are refused everywhere, the format's own run: {refusal}")
    need(claimed > 0, "refused on every chip and dtype")


def devices() -> list[DeviceInfo]:
    """A CPU and one of every chip that Triton compiles for."""
    chips = [DeviceInfo("cuda", f"sm_{sm}", divmod(sm, 10), kib * 1024, 16 << 30) for sm, kib in SHARED_MEMORY.items()]
    return [DeviceInfo("cpu", "cpu"), *chips]


@FORMAT.add("scales")
def scales(subject: WeightSubject) -> None:
    """A scale that is NaN or infinite is refused by `bind`; one that is zero gives zeros or is refused, never NaN."""
    tried = 0
    for own in subject.stored[:2]:
        for leaf in float_leaves(own):
            for value in (float("nan"), float("inf")):
                tried += 1
                _refused(subject, own, leaf, value)
            _zero(subject, own, leaf)
    if not tried:
        raise NotApplicable("no float tensors beside weight and bias")


def float_leaves(own: Stored) -> list[str]:
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return [leaf for leaf, t in own.tensors.items() if t.dtype in floats and leaf not in ("weight", "bias")]


def _with(own: Stored, leaf: str, value: float) -> Stored:
    t = own.tensors[leaf].clone()
    t.view(-1)[t.numel() // 2] = value
    return own.changed(**{leaf: t})


def _refused(subject: WeightSubject, own: Stored, leaf: str, value: float) -> None:
    for broken, place, dtype, _ in subject.runs([_with(own, leaf, value)]):
        try:
            broken.bind(place, dtype)
        except ValueError as e:
            need(own.spec.name in str(e), f"{own}: the error about {leaf} = {value} does not name the module: {e}")
            return
        raise CheckFailed(f"{own} on {place}: bind takes {leaf} = {value}; need: ValueError naming the module")


def _zero(subject: WeightSubject, own: Stored, leaf: str) -> None:
    for zeroed, place, dtype, limit in subject.runs([_with(own, leaf, 0.0)]):
        try:
            op = zeroed.bind(place, dtype)
        except ValueError:
            return
        x = inputs(2, own.spec, dtype, place)
        limit = limit + ROUNDED if op.rounds_activations else limit
        error = relative_error(op(x), product(zeroed, x))
        need(error <= limit, f"{own} on {place}: with {leaf} = 0 the result is off by {error:.2g}")


@FORMAT.add("quantizer")
def quantizer(subject: WeightSubject) -> None:
    """The calibration hook: config and tensors that the format reads, near the weight, the same bytes each time."""
    if not subject.quantizers:
        raise NotApplicable("the format cannot be made here: quantizer() is None")
    for q in subject.quantizers:
        config = q.config(["lm_head"])
        json.dumps(config)
        method = config.get("quant_method")
        known = {subject.plugin.name, *subject.plugin.methods, *(r.name for r in list_plugins("weight"))}
        need(method in known, f"config() says quant_method {method!r}, which no installed plugin reads")
        subject.reader(config).parse(config)
    made = [own for own in subject.stored if own.made]
    need(bool(made), "the quantizer accepts none of the kit's linears")
    for own in made:
        error = relative_error(own.weight, weight_of(own.spec))
        need(error <= WORST_ROUNDING, f"{own}: dequantize(quantize(w)) is off by {error:.2g} of w")
    for q in subject.quantizers:
        if q.accepts(PLAIN) is None:
            _same_twice(q.quantize, PLAIN)
            _calibrated(q)
            broken = weight_of(PLAIN)
            broken[1, 1] = float("nan")
            try:
                q.quantize(PLAIN, broken)
            except ValueError:
                continue
            raise CheckFailed("quantize takes a weight with NaN; need: ValueError")


def _same_twice(make: Any, spec: LinearSpec) -> None:
    w = weight_of(spec)
    before = w.clone()
    first, again = make(spec, w), make(spec, w.to(torch.float32).clone())
    need(torch.equal(w, before), "the quantizer changes the weight that it is given")
    same = first.keys() == again.keys() and all(torch.equal(t, again[leaf]) for leaf, t in first.items())
    need(same, "the quantizer makes other tensors of the same weight the second time")
    away = [leaf for leaf, t in first.items() if t.device.type != "cpu"]
    need(not away, f"the quantizer leaves {', '.join(away)} on another device; need: the CPU")


def _calibrated(q: Any) -> None:
    if not isinstance(q, CalibratedQuantizer):
        return
    x = torch.randn(256, PLAIN.in_features, generator=torch.Generator().manual_seed(2))
    x[:, 5] *= 20
    moment = x.T @ x / len(x) if q.wants_moment else None
    stats = InputStats(len(x), x.abs().mean(0), x.abs().amax(0), moment)
    plain, made = q.quantize(PLAIN, weight_of(PLAIN)), q.quantize_calibrated(PLAIN, weight_of(PLAIN), stats)
    need({n: (t.dtype, t.shape) for n, t in made.items()} == {n: (t.dtype, t.shape) for n, t in plain.items()},
         "quantize_calibrated makes other tensors than quantize")  # fmt: skip
    factors = q.input_factors([(PLAIN, weight_of(PLAIN))], stats, None)
    good = factors is None or (factors.shape == (PLAIN.in_features,) and bool((factors > 0).all()))
    need(good, "input_factors must be None or positive, one for each input")


@FORMAT.add("sharding")
def sharding(subject: WeightSubject) -> None:
    """Halves along the outputs join, halves along the inputs add up, as output_dim and input_dim say."""
    done = 0
    for own in subject.stored:
        for along in ("output", "input"):
            allowed = own.scheme.splits_outputs if along == "output" else own.scheme.splits_inputs
            halves = split(own, along) if allowed else None
            if halves is None:
                continue
            done += 1
            parts = [half.weight for half in halves]
            whole = torch.cat(parts, dim=0 if along == "output" else 1)
            error = relative_error(whole, own.weight)
            need(error <= 1e-6, f"{own}: halves along the {along}s mean another weight (off by {error:.2g})")
            _run_halves(subject, own, halves, along)
    if not done:
        raise NotApplicable("no stored linear has tensors that halve")


def split(own: Stored, along: str) -> list[Stored] | None:
    """Two linears with half of the outputs or inputs each; None where a tensor's dimension is odd, or a half of the
    inputs would end within a group that shares a scale."""
    spec = own.spec
    size = spec.out_features if along == "output" else spec.in_features
    per_scale = (own.scheme.inputs_per_scale(spec) if along == "input" else None) or size
    if size % 16 or (per_scale < size and (size // 2) % per_scale):
        return None
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for n in own.scheme.tensors(spec):
        t = own.tensors.get(n.leaf)
        if t is None or (n.leaf == "bias" and along == "input"):
            continue
        dim = n.output_dim if along == "output" else n.input_dim
        if dim is not None and t.shape[dim] % 2:
            return None
        pieces = [t, t] if dim is None else list(t.chunk(2, dim))
        for half, piece in zip(halves, pieces, strict=True):
            half[n.leaf] = piece.clone()
    if along == "output":
        smaller = replace(spec, out_features=size // 2)
    else:
        smaller = replace(spec, in_features=size // 2, bias=False)
    return [replace(own, spec=smaller, tensors=half, made=False) for half in halves]


def _run_halves(subject: WeightSubject, own: Stored, halves: list[Stored], along: str) -> None:
    for half_runs in subject.runs(halves[:1]):
        _, place, dtype, limit = half_runs
        x = inputs(2, own.spec, dtype, place)
        ops = [half.bind(place, dtype) for half in halves]
        if along == "output":
            y = torch.cat([op(x).float().cpu() for op in ops], dim=1)
        else:
            y = sum((op(part).float().cpu() for op, part in zip(ops, x.chunk(2, 1), strict=True)), torch.zeros(()))
        want = x.float().cpu() @ own.weight.T
        if own.spec.bias and along == "output":
            want = want + own.tensors["bias"].float()
        limit = limit + ROUNDED if ops[0].rounds_activations else limit
        error = relative_error(y, want)
        need(error <= 2 * limit, f"{own} on {place}: two halves along the {along}s are off by {error:.2g}")

