"""Every kernel that serving would use here, against plain float32 arithmetic: linears of each format, KV caches, norms,
rotation, activations, experts, maxima of logits, top_k and top_p."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from qengine.conformance.kit import Check, CheckFailed, need, run_checks
from qengine.conformance.kv_steps import KV_STEPS
from qengine.conformance.kv_subject import SMALL, KVSubject, make_cache
from qengine.conformance.places import Place
from qengine.conformance.weight_numbers import ROUNDED, compare
from qengine.conformance.weight_subject import Stored, weight_of
from qengine.doctor.experts import experts_agree
from qengine.doctor.layers import LAYER_TESTS
from qengine.plugin import DeviceInfo, LinearSpec
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime.device import choose_dtype
from qengine.runtime.device_matrix import kv_plugins
from qengine.runtime.quant_config import QuantConfig
from qengine.runtime.quant_select import DENSE, select_quant
from qengine.runtime.sampling_kernels import wrong_floors, wrong_maxima

BUDGET_S = 30.0
ROWS = (1, 3, 20, 300)
"""Rows of a product: kernels differ in where they change their way."""
SPECS = (LinearSpec("model.layers.0.mlp.up_proj", 256, 192), LinearSpec("model.layers.0.mlp.down_proj", 384, 128))
GPU_SPECS = (*SPECS, LinearSpec("model.layers.0.self_attn.o_proj", 2048, 256))
"""With what 4-bit linears of many rows have to have for sm_90's own kernel, and for programs that share a tile."""
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Relative error against float32, by compute dtype."""
KV_CHECKS = ("store", "attention")
VOCABULARIES = (320, 4096, 151936)


@dataclass(frozen=True)
class Result:
    """`state` is passed, failed or skipped; `line` the kernel, the first line of a failure, or why it was skipped."""

    what: str
    state: str
    line: str
    seconds: float


Test = Callable[[], str]
"""Returns which kernel ran; raises for a wrong result, and LookupError for what does not apply here."""


def self_test(device: torch.device, info: DeviceInfo, budget_s: float = BUDGET_S) -> list[Result]:
    """Run everything on `device`, in the dtypes that serving would choose. Starts no test after `budget_s`."""
    place = Place(info.name or info.type, device, info, _limits(info))
    start, out = time.perf_counter(), []
    for what, test in _tests(place):
        if time.perf_counter() - start > budget_s:
            out.append(Result(what, "skipped", f"{budget_s:g} seconds were over", 0.0))
            continue
        begin = time.perf_counter()
        state, line = _run(test)
        out.append(Result(what, state, line, time.perf_counter() - begin))
    return out


def _run(test: Test) -> tuple[str, str]:
    try:
        return "passed", test()
    except LookupError as e:
        return "skipped", str(e)
    except Exception as e:  # a kernel may raise anything, and all of it is a finding
        first = (str(e).strip().splitlines() or [""])[0]
        return "failed", first if isinstance(e, CheckFailed) else f"{type(e).__name__}: {first}"


def _limits(info: DeviceInfo) -> tuple[tuple[torch.dtype, float], ...]:
    """The dtypes of 16-bit and, on a CPU, of float32 checkpoints."""
    stored = (torch.bfloat16, torch.float32) if info.type == "cpu" else (torch.bfloat16, torch.float16)
    dtypes = dict.fromkeys(choose_dtype("auto", dtype, info)[0] for dtype in stored)
    return tuple((dtype, LIMITS[dtype]) for dtype in dtypes)


def _tests(place: Place) -> Iterator[tuple[str, Test]]:
    for name, layer_test in LAYER_TESTS:
        for dtype, limit in place.limits:
            yield f"{name}, {short(dtype)}", partial(layer_test, place.device, place.info, dtype, limit)
    yield "maxima of logits", partial(_maxima, place)
    yield "top_k and top_p", partial(_floors, place)
    for what, stored in stored_linears(GPU_SPECS if place.info.type == "cuda" else SPECS):
        for dtype, limit in place.limits:
            yield f"{what}, {short(dtype)}", partial(_linear, stored, place, dtype, limit)
            if place.info.type == "cuda":
                yield f"experts of {what}, {short(dtype)}", partial(experts_agree, stored[0], place, dtype, limit)
    for name, plugin in kv_plugins():
        subject = KVSubject(plugin, (place,))
        for check in KV_STEPS:
            if check.name in KV_CHECKS:
                yield f"KV cache {name}: {check.name}", partial(_kv, check, subject)


def stored_linears(specs: Sequence[LinearSpec] = SPECS) -> Iterator[tuple[str, list[Stored]]]:
    """By format, small linears that hold what it makes: 16-bit, then each installed format's own samples."""
    dense = [Stored(load_plugin("weight", DENSE), None, spec, {"weight": weight_of(spec)}, True) for spec in specs]
    yield dense[0].scheme.format, dense
    for record in list_plugins("weight"):
        try:
            yield from _of_plugin(record.name, specs)
        except Exception:  # `qengine plugins` shows what does not load, `qengine plugins check` what raises
            continue


def _of_plugin(name: str, specs: Sequence[LinearSpec]) -> Iterator[tuple[str, list[Stored]]]:
    plugin = load_plugin("weight", name)
    quantizer = plugin.quantizer()
    if quantizer is not None:
        config = quantizer.config([])
        method = str(config.get("quant_method", name))
        quant = select_quant(None, QuantConfig(method, config, "doctor")).quant
        assert quant is not None
        taken = [spec for spec in specs if quantizer.accepts(spec) is None]
        own = [
            Stored(type(quant), config, spec, quantizer.quantize(spec, weight_of(spec)), True) for spec in taken
        ]
        if own:
            yield own[0].scheme.format, own
    if plugin.quantizes_at_load:
        own = [Stored(plugin, None, spec, {"weight": weight_of(spec)}, True) for spec in specs]
        yield own[0].scheme.format, own
    for sample in plugin.samples():
        stored = Stored(plugin, sample.config, sample.spec, sample.tensors, False)
        yield stored.scheme.format, [stored]


def _linear(stored: list[Stored], place: Place, dtype: torch.dtype, limit: float) -> str:
    kernel = ""
    for own in stored:
        answer = own.scheme.capability(place.info, dtype)
        if not answer:
            raise LookupError(f"refused here: {answer.reason}")
        op = own.bind(place, dtype)
        compare(own, op, place, dtype, limit + ROUNDED if op.rounds_activations else limit, ROWS)
        kernel = op.kernel
    return kernel


def _maxima(place: Place) -> str:
    for vocab_size in VOCABULARIES:
        wrong = wrong_maxima(place.device, vocab_size)
        need(wrong is None, f"{vocab_size} logits: {wrong}")
    return "Triton, parts of rows first" if place.device.type == "cuda" else "torch"


def _floors(place: Place) -> str:
    for vocab_size in VOCABULARIES:
        wrong = wrong_floors(place.device, vocab_size)
        need(wrong is None, f"{vocab_size} logits: {wrong}")
    return "Triton, searching" if place.device.type == "cuda" else "sorting"


def _kv(check: Check, subject: KVSubject) -> str:
    (outcome,) = run_checks([check], subject)
    if outcome.state == "not applicable":
        raise LookupError(outcome.line)
    need(outcome.state == "passed", outcome.line)
    for spec, place, dtype, _ in subject.runs(SMALL):
        return make_cache(subject.plugin, spec, 16, place, dtype).layer.kernel
    raise LookupError("refused here")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
