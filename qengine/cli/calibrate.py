"""`qengine calibrate`: quantised weights and KV scales from plain text, with what they cost."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qengine.cli.options import UNITS_NOTE, add_options, config_from, flags_of, say
from qengine.config import EngineConfig, option, options
from qengine.core.kv_map import read_kv_map
from qengine.errors import ConfigError
from qengine.plugin.discovery import find_plugin

if TYPE_CHECKING:
    from qengine_calibration.run import RunOptions

NAME = "calibrate"
HELP = "Make quantised weights or KV-cache scales from text"
WHAT, WEIGHTS, KV, TEXT, RUN = "what to make", "weights", "KV cache", "text", "run"
MIN_EVAL = 128
LEAST = {"seq_len": 16, "samples": 1, "max_memory": 1}


@dataclass(frozen=True)
class CalibrateConfig:
    """The options of `qengine calibrate`."""

    quant: str | None = option(
        None, "Weight format to make, a plugin name: awq, gptq, fp8", group=WHAT, metavar="NAME"
    )
    kv_dtype: str | None = option(
        None, "KV dtype to measure scales for, such as fp8, or a map as for serving: k=fp8_e4m3,v=int4", group=WHAT,
        metavar="NAME",
    )
    out: str | None = option(
        None,
        "Folder to write: the quantised model, or the KV scales (default for those: the model's own folder)",
        group=WHAT,
        metavar="FOLDER",
    )
    bits: int | None = option(None, "Bits of a weight, where the format has a choice", group=WEIGHTS)
    group_size: int | None = option(
        None, "Inputs that share a scale (default: the largest of 128, 64, 32 that fits, where the format has groups)",
        group=WEIGHTS,
    )  # fmt: skip
    zero_point: bool | None = option(None, "Zero points (awq)", group=WEIGHTS)
    symmetric: bool | None = option(None, "One zero point for all groups, in the middle (gptq)", group=WEIGHTS)
    act_order: bool | None = option(None, "Round inputs in the order of their size (gptq)", group=WEIGHTS)
    granularity: str | None = option(
        None, "What shares a scale: channel or block (fp8; default: channel)", group=WEIGHTS, metavar="NAME"
    )
    activations: str | None = option(
        None, "How activations will be rounded: dynamic, or static by a measured scale (fp8; default: dynamic)",
        group=WEIGHTS, metavar="NAME",
    )  # fmt: skip
    damping: float | None = option(
        None, "Share of the Hessian's mean diagonal that is added to it, more where that is too little (gptq)",
        group=WEIGHTS,
    )  # fmt: skip
    feed: str = option(
        "original", "Whose outputs the next layer sees", group=WEIGHTS, choices=("original", "quantised")
    )
    kv_granularity: str | None = option(
        None, "What shares a KV scale (default: head; with --embed tensor, which every reader takes)", group=KV,
        choices=("head", "tensor"),
    )  # fmt: skip
    method: str = option(
        "output", "How KV scales are chosen: by the least error of the attention's output, by that of the values, by "
        "their largest, or by the largest but for one in 10,000", group=KV,
        choices=("output", "mse", "amax", "percentile"),
    )  # fmt: skip
    max_kv_damage: float = option(
        0.2, "Layers whose attention output a scaled KV cache would put further off (relative error) keep 16 bits",
        group=KV,
    )  # fmt: skip
    embed: bool = option(
        False, "Write KV scales as k_scale and v_scale into a copy of the weights, for other engines", group=KV
    )
    data: str | None = option(
        None,
        "Text: a .txt (rows parted by lines of ---), .jsonl or .parquet file, or a data set on the hub (owner/name or "
        "owner/name:FILE). Default: a built-in set, some 4,000 tokens",
        group=TEXT, metavar="FILE",
    )  # fmt: skip
    data_field: str | None = option(
        None, "Field of a row that holds its text (default: text, content, prompt, messages or conversations)",
        group=TEXT, metavar="NAME",
    )  # fmt: skip
    seq_len: int | None = option(
        None,
        "Tokens of a sequence: rows are packed and cut to this (default: 512, or the model's context where that is "
        "shorter)",
        group=TEXT,
    )
    samples: int | None = option(None, "Most sequences to use (default: all)", group=TEXT)
    eval_tokens: int = option(
        4096, "Tokens of held-out text on which the result is compared with the model before; 0: no comparison",
        group=TEXT,
    )  # fmt: skip
    device: str = option("auto", "Device to run on", group=RUN, choices=("auto", "cuda", "cpu"))
    max_memory: int | None = option(
        None, "Bytes that the run may take on that device, on a CPU the whole process: micro-batches are made to fit",
        group=RUN, metavar="BYTES",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit of a hub model", group=RUN)
    resume: bool = option(False, "Go on where a killed run with the same settings stopped", group=RUN)
    quiet: bool = option(False, "No progress bar", group=RUN, flags=("-q",))

    def __post_init__(self) -> None:
        if self.quant is None and self.kv_dtype is None:
            raise ConfigError("nothing to calibrate", need="--quant NAME, --kv-dtype NAME, or both")
        if self.out is None and (self.quant is not None or self.embed):
            raise ConfigError("a copy of the model needs a place", need="--out FOLDER")
        for group, asked, need in ((WEIGHTS, self.quant, "--quant NAME"), (KV, self.kv_dtype, "--kv-dtype NAME")):
            given = [flags_of(f, o)[0] for f, o in options(type(self)) if o.group == group and _changed(self, f)]
            if asked is None and given:
                raise ConfigError(f"{' and '.join(given)}: nothing to make of that kind ({group})", need=need)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} is too small", have=value, need=f">= {least}")
        if self.eval_tokens and self.eval_tokens < MIN_EVAL:
            raise ConfigError("--eval-tokens is too small", have=self.eval_tokens, need=f">= {MIN_EVAL}, or 0 for none")


def _changed(config: CalibrateConfig, field: dataclasses.Field[Any]) -> bool:
    return getattr(config, field.name) != field.default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qengine calibrate MODEL [--quant NAME] [--kv-dtype NAME] [flags]"
    parser.epilog = UNITS_NOTE
    parser.add_argument("model", metavar="MODEL", help="Local folder, hub name, or demo")
    add_options(parser, CalibrateConfig)


def run(args: argparse.Namespace) -> int:
    """Print the folder that was written and a summary of what was measured."""
    config = config_from(CalibrateConfig, args)
    if config.quant is not None:
        find_plugin("weight", config.quant)
    if config.kv_dtype is not None:
        for dtype in read_kv_map(config.kv_dtype, EngineConfig.kv_cache_dtype).dtypes:
            find_plugin("kv", dtype)

    from qengine.text.tokenizer import Tokenizer
    from qengine_calibration import damage_report
    from qengine_calibration.damage import end_to_end, write_report
    from qengine_calibration.data_files import find_data
    from qengine_calibration.make import fitting_length, make_copy, make_kv_scales
    from qengine_calibration.output import KV_REPORT, REPORT
    from qengine_calibration.progress import bar
    from qengine_calibration.texts import load_texts

    folder = _model(args.model, config)
    data, name = (None, None) if config.data is None else find_data(config.data, say)
    texts = load_texts(
        data, Tokenizer.load(folder), length=fitting_length(folder, config.seq_len), samples=config.samples,
        field=config.data_field, name=name,
    )  # fmt: skip
    options = _options(config, folder)
    if config.quant is None and not config.embed:
        target, report = Path(config.out) if config.out else folder, KV_REPORT
        with bar("calibrate", config.quiet) as tick:
            facts = make_kv_scales(folder, target, texts, options, say=say, tick=tick)
    else:
        assert config.out is not None
        target, report = Path(config.out), REPORT
        with bar("calibrate", config.quiet) as tick:
            facts = make_copy(folder, target, texts, options, embed=config.embed, say=say, tick=tick)
    if config.eval_tokens:
        with bar("evaluate", config.quiet) as tick:
            sides = _sides(config, folder, target)
            facts["end_to_end"] = end_to_end(*sides, config.eval_tokens, say, tick, config.max_memory)
    for line in damage_report.lines(facts):
        say(line)
    write_report(facts, target / report, say)
    print(target)
    return 0


def _sides(config: CalibrateConfig, folder: Path, target: Path) -> tuple[EngineConfig, EngineConfig]:
    """The model before and after, as they would be served."""
    before = EngineConfig(model=str(folder), device=config.device)
    kv_dtype = before.kv_cache_dtype if config.kv_dtype is None else config.kv_dtype
    if config.quant is None and not config.embed:
        return before, dataclasses.replace(before, kv_scales=str(target), kv_cache_dtype=kv_dtype)
    return before, dataclasses.replace(before, model=str(target), kv_cache_dtype=kv_dtype)


def _model(name: str, config: CalibrateConfig) -> Path:
    from qengine.runtime.hub import resolve_folder

    return resolve_folder(name, revision=config.revision, say=say)


def _options(config: CalibrateConfig, folder: Path) -> RunOptions:
    from qengine_calibration.kv_scales import KVOptions
    from qengine_calibration.make import fitting_weights
    from qengine_calibration.run import RunOptions

    weights = kv = None
    if config.quant is not None:
        names = ("bits", "group_size", "zero_point", "symmetric", "act_order", "granularity", "activations", "damping")
        weights = fitting_weights(folder, config.quant, {name: getattr(config, name) for name in names})
    if config.kv_dtype is not None:
        granularity = config.kv_granularity or ("tensor" if config.embed else "head")
        kv = KVOptions(config.kv_dtype, granularity, config.method, config.max_kv_damage)
    return RunOptions(
        weights, kv, feed=config.feed, device=config.device, max_memory=config.max_memory, resume=config.resume
    )
