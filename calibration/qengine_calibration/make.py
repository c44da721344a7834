"""What `qengine calibrate` makes: a quantised folder, KV scales beside a model or inside a copy of it."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from qengine.errors import ConfigError
from qengine.models.settings import max_position
from qengine.plugin import CalibratedQuantizer, WeightQuant
from qengine.plugin.discovery import load_plugin
from qengine.runtime.cache_dir import building, only_one
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.checkpoint_writer import write_json
from qengine.runtime.kv_scales import LOOKS_LIKE
from qengine.runtime.kv_sidecar import model_fingerprint, write_sidecar
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import select_quant
from qengine_calibration.kv_scales import SIXTEEN_BIT, KVOptions
from qengine_calibration.layer import reader_of
from qengine_calibration.output import REPORT, write_copy
from qengine_calibration.quantize import copied_files, group_size, left_out, linear_specs
from qengine_calibration.run import CalibrationRun, RunOptions, Weights, kv_facts
from qengine_calibration.texts import LENGTH, Texts
from qengine_calibration.work import WorkFolder

EMBEDDED_LARGEST = 448.0
"""Every reader of k_scale and v_scale tensors divides by them for this largest value, that of e4m3."""

Say = Callable[[str], None]
Tick = Callable[[int, int], None]


def weights_option(method: str, **options: Any) -> Weights:
    """A plugin's quantizer with the given options (None: the plugin's default). Raises ConfigError for a format that
    cannot be made here and for options that it does not know."""
    plugin = load_plugin("weight", method)
    given = {k: v for k, v in options.items() if v is not None}
    try:
        quantizer = plugin.quantizer(**given)
    except TypeError as e:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(e)):
            flag = f"--{unknown[1].replace('_', '-')}"
            raise ConfigError(f"{method} has no {flag}", hint=f"--quant {method} without it") from e
        raise ConfigError(f"{method}: {e}") from e
    except ValueError as e:
        raise ConfigError(f"{method}: {e}") from e
    if quantizer is None:
        raise ConfigError(f"{method} weights cannot be made, only read")
    return Weights(plugin, quantizer, given)


def fitting_weights(folder: Path, method: str, options: Mapping[str, Any]) -> Weights:
    """`weights_option` with the largest group size that fits the model, where the format has groups and none is
    asked for."""
    given = dict(options)
    if takes_groups(load_plugin("weight", method)) and given.get("group_size") is None:
        specs, _ = linear_specs(Checkpoint.open(folder))
        given["group_size"] = group_size(list(specs.values()))
    return weights_option(method, **given)


def fitting_length(folder: Path, asked: int | None = None) -> int:
    """Tokens of a sequence: as many as asked for, else 512 or the model's context where that is shorter. Raises
    ConfigError for more than the context."""
    context = max_position(load_config(Checkpoint.open(folder)))
    if asked is not None and asked > context:
        raise ConfigError(
            f"--seq-len is longer than the context of {folder}", have=f"{asked} tokens",
            need=f"at most {context} tokens",
        )  # fmt: skip
    return min(LENGTH, context) if asked is None else asked


def takes_groups(plugin: type[WeightQuant]) -> bool:
    """Whether the weights that a format makes have groups of a size that can be chosen."""
    probe = plugin.quantizer()
    return probe is not None and "group_size" in inspect.signature(type(probe)).parameters


def work_folder(target: Path) -> Path:
    """Where a run keeps what it has finished; beside its result."""
    return target.with_name(f".{target.name}.calibration")


def make_copy(
    source: Path, target: Path, texts: Texts, options: RunOptions, *, embed: bool = False,
    say: Say = lambda line: None, tick: Tick = lambda done, total: None, elsewhere: str = "another --out",
) -> dict[str, Any]:
    """Write `target`, a copy of `source` with the weights that `options` ask for, its KV scales, or both; returns what
    was measured, which also lies in the copy as calibration.json.

    KV scales go into a calibration file in the copy, or with `embed` into its weights, as k_scale and v_scale.
    `target` appears when it is complete. Raises ConfigError when it is there already, UserError where it cannot be
    written, of which `elsewhere` is the way out.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already", hint="another --out, or removing it")
    if embed and options.kv is not None:
        _check_embeddable(options.kv)
    checkpoint = Checkpoint.open(source)
    with building(target, say, elsewhere=elsewhere) as partial:
        if partial is None:
            raise ConfigError(f"{target} was made by another process meanwhile")
        run = CalibrationRun(checkpoint, texts, options, work_folder(target), model_fingerprint(checkpoint))
        _begin(run, texts, say)
        run.run(tick)
        config, scales = dict(checkpoint.raw_config), kv_tensors(run.work)
        if options.weights is not None:
            skipped = skipped_modules(checkpoint, options.weights)
            config["quantization_config"] = options.weights.quantizer.config(skipped)
        if embed and options.kv is not None:
            config, scales = embedded(run, config, scales, texts, say)
        old = frozenset(n for n in checkpoint.tensors if scales and LOOKS_LIKE.search(n))
        write_copy(checkpoint, run.work, partial, config, copied_files(source), old, scales if embed else None)
        facts = report(run, texts, options)
        if options.kv is not None:
            facts["kv"]["embedded"] = embed
        write_json(partial / REPORT, facts)
        if scales and not embed:
            assert options.kv is not None
            write_sidecar(partial, model_fingerprint(Checkpoint.open(partial)), scales, kv_report(run, texts, options))
    run.work.remove()
    return facts


def make_kv_scales(
    source: Path, folder: Path, texts: Texts, options: RunOptions, *, say: Say = lambda line: None,
    tick: Tick = lambda done, total: None,
) -> dict[str, Any]:
    """Write the KV calibration file of `source` into `folder`; returns what was measured."""
    checkpoint = Checkpoint.open(source)
    mark = model_fingerprint(checkpoint)
    with _writable(folder), only_one(folder, say):
        run = CalibrationRun(checkpoint, texts, options, folder / ".kv_scales.calibration", mark)
        _begin(run, texts, say)
        run.run(tick)
        path = write_sidecar(folder, mark, kv_tensors(run.work), kv_report(run, texts, options))
        say(f"KV scales: {path}")
        facts = report(run, texts, options)
        run.work.remove()
    return facts


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """The folder is there while the block runs; one that was made for it is gone where the block fails before anything
    came into it. Raises ConfigError where nothing can."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"KV scales cannot be written into {folder}: {e.strerror}", hint="another --out") from e
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"KV scales cannot be written into {folder}", have="no right to write", hint="another --out")
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):  # holds something
                folder.rmdir()
        raise


def _check_embeddable(kv: KVOptions) -> None:
    """All layers alike: an engine that reads k_scale and v_scale knows of one dtype."""
    if odd := [p.name for p in kv.plugins if p.max_value != EMBEDDED_LARGEST]:
        raise ConfigError(
            f"--embed: k_scale and v_scale in a checkpoint are for an e4m3 cache, not {' and '.join(odd)}",
            need="--kv-dtype fp8, or KV scales beside the model",
        )


def embedded(
    run: CalibrationRun, config: dict[str, Any], scales: dict[str, torch.Tensor], texts: Texts, say: Say
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and scales of a copy that holds its KV scales as other engines look for them."""
    options, checkpoint = run.options, run.stream.checkpoint
    kv = options.kv
    assert kv is not None
    if options.weights is not None:
        reader: type[WeightQuant] = type(reader_of(options.weights.quantizer, options.weights.plugin))
    else:
        choice = select_quant(None, checkpoint.quant)
        reader = type(choice.quant or choice.dense)
    told = reader.with_kv_scales(config.get("quantization_config"), kv.granularity)
    if told is None:
        say(
            f"{reader.name} files have no word for KV scales per {kv.granularity}: k_scale and v_scale are "
            "written, and engines other than this one may pass them over"
        )
    else:
        config = config | {"quantization_config": told}
    if kept := kv_report(run, texts, options)["kept_16_bit"]:
        say(
            f"WARNING: {len(kept)} layers should keep a 16-bit KV cache, which scales in a checkpoint cannot say: "
            f"{', '.join(kept)}"
        )
    if kv.granularity == "head":
        scales = {name: scale.reshape(-1, 1, 1) for name, scale in scales.items()}
    return config, scales


def _begin(run: CalibrationRun, texts: Texts, say: Say) -> None:
    say(f"calibrating with {texts.describe()}")
    if run.options.weights is not None:
        specs, _ = linear_specs(run.stream.checkpoint)
        for reason, count in Counter(left_out(specs.values(), run.options.weights.quantizer).values()).items():
            say(f"{count} of {len(specs)} linears stay as they are: {reason}")
    for line in run.plan():
        say(line)
    if run.work.lost:
        say(
            f"WARNING: {run.work.lost} layers that an earlier run finished are of no use: its model, text or settings "
            "were others"
        )
    if run.work.done:
        say(f"going on behind layer {run.work.done}, where an earlier run stopped")


def skipped_modules(checkpoint: Checkpoint, weights: Weights) -> list[str]:
    """Modules that stay as they are, for the copy's config."""
    specs, dense = linear_specs(checkpoint)
    return [*dense, *left_out(specs.values(), weights.quantizer)]


def kv_tensors(work: WorkFolder) -> dict[str, torch.Tensor]:
    """k_scale and v_scale of every layer."""
    out: dict[str, torch.Tensor] = {}
    for i in range(work.done):
        if work.facts(i).get("kv"):
            header = work.tensors(i)
            out |= {n: work.read(header, n) for n in header.tensors if LOOKS_LIKE.search(n)}
    return out


def kv_report(run: CalibrationRun, texts: Texts, options: RunOptions) -> dict[str, Any]:
    """`measured_for` and `kv_dtype` (where some layers keep 16 bits, they differ) are one name, or one for each layer,
    or for K and V of each layer."""
    kv = options.kv
    assert isinstance(kv, KVOptions)
    layers = kv_facts(run.work)
    measured = {layer: {side: f[side]["kv_dtype"] for side in "kv"} for layer, f in layers.items()}
    kept = [layer for layer, f in layers.items() if f["attention_output_error"] > kv.most_damage]
    served = measured | {layer: dict.fromkeys("kv", SIXTEEN_BIT) for layer in kept}
    return {
        "kv_dtype": _briefly(served), "measured_for": _briefly(measured), "method": kv.method,
        "granularity": kv.granularity, "most_damage": kv.most_damage, "kept_16_bit": kept,
        "text": texts.facts(), "layers": layers,
    }  # fmt: skip


def _briefly(sides: Mapping[str, Mapping[str, str]]) -> Any:
    """{layer: {"k": name, "v": name}} with what is the same said once."""
    layers = {layer: own["k"] if own["k"] == own["v"] else dict(own) for layer, own in sides.items()}
    names = list(layers.values())
    if names and isinstance(names[0], str) and all(name == names[0] for name in names):
        return names[0]
    return layers


def report(run: CalibrationRun, texts: Texts, options: RunOptions) -> dict[str, Any]:
    """All figures of a run as plain data: the text, each linear's errors, tokens of those that saw few, KV figures."""
    facts = [run.work.facts(i) for i in range(run.work.done)]
    out: dict[str, Any] = {"text": texts.facts(), "feed": options.feed, "memory": run.memory_facts()}
    if options.weights is not None:
        out["weights"] = {"format": options.weights.plugin.name, "options": options.weights.options}
        out["linears"] = {name: f for layer in facts for name, f in layer["linears"].items()}
        out["factors"] = {name: f for layer in facts for name, f in layer["factors"].items()}
        out["cold"] = {name: n for layer in facts for name, n in layer["cold"].items()}
        if out["cold"]:
            assert isinstance(options.weights.quantizer, CalibratedQuantizer)
            out["cold_rule"] = options.weights.quantizer.cold_rule
    if options.kv is not None:
        out["kv"] = kv_report(run, texts, options)
        del out["kv"]["text"]
    return out

