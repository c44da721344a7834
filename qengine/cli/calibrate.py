"""`qengine calibrate`: quantised weights and KV scales from plain text, with what they cost."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qengine.cli.options import UNITS_NOTE, add_options, config_from, say
from qengine.config import option
from qengine.errors import ConfigError
from qengine.plugin.discovery import find_plugin

if TYPE_CHECKING:
    from qengine_calibration.run import RunOptions
    from qengine_calibration.texts import Texts

NAME = "calibrate"
HELP = "Make quantised weights or KV-cache scales from text"
WHAT, WEIGHTS, KV, TEXT, RUN = "what to make", "weights", "KV cache", "text", "run"


@dataclass(frozen=True)
class CalibrateConfig:
    """The options of `qengine calibrate`."""

    quant: str | None = option(
        None, "Weight format to make, a plugin name: awq, gptq, fp8", group=WHAT, metavar="NAME"
    )
    kv_dtype: str | None = option(
        None, "KV dtype to measure scales for, such as fp8", group=WHAT, metavar="NAME"
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
    kv_granularity: str = option("head", "What shares a KV scale", group=KV, choices=("head", "tensor"))
    method: str = option("mse", "How KV scales are chosen", group=KV, choices=("mse", "amax", "percentile"))
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
    seq_len: int = option(512, "Tokens of a sequence: rows are packed and cut to this", group=TEXT)
    samples: int | None = option(None, "Most sequences to use (default: all)", group=TEXT)
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
        if self.embed and self.kv_dtype is None:
            raise ConfigError("--embed is about KV scales", need="--kv-dtype NAME")
        if self.seq_len < 16:
            raise ConfigError("--seq-len is too short", have=self.seq_len, need=">= 16")


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
        find_plugin("kv", config.kv_dtype)

    from qengine.text.tokenizer import Tokenizer
    from qengine_calibration.data_files import find_data
    from qengine_calibration.make import make_copy, make_kv_scales
    from qengine_calibration.progress import bar
    from qengine_calibration.texts import load_texts

    folder = _model(args.model, config)
    data, name = (None, None) if config.data is None else find_data(config.data, say)
    texts = load_texts(
        data, Tokenizer.load(folder), length=config.seq_len, samples=config.samples, field=config.data_field, name=name
    )
    options = _options(config, folder)
    with bar("calibrate", config.quiet) as tick:
        if config.quant is None and not config.embed:
            target = Path(config.out) if config.out else folder
            facts = make_kv_scales(folder, target, texts, options, say=say, tick=tick)
        else:
            assert config.out is not None
            target = Path(config.out)
            facts = make_copy(folder, target, texts, options, embed=config.embed, say=say, tick=tick)
    for line in summary(facts, texts):
        say(line)
    print(target)
    return 0


def _model(name: str, config: CalibrateConfig) -> Path:
    if name == "demo":
        from qengine.runtime.demo import demo_folder

        return demo_folder(say)
    from qengine.runtime.hub import resolve_folder

    return resolve_folder(name, revision=config.revision, say=say)


def _options(config: CalibrateConfig, folder: Path) -> RunOptions:
    from qengine.plugin.discovery import load_plugin
    from qengine_calibration.kv_scales import KVOptions
    from qengine_calibration.make import fitting_weights
    from qengine_calibration.run import RunOptions

    weights = kv = None
    if config.quant is not None:
        names = ("bits", "group_size", "zero_point", "symmetric", "act_order", "granularity", "activations", "damping")
        weights = fitting_weights(folder, config.quant, {name: getattr(config, name) for name in names})
    if config.kv_dtype is not None:
        kv = KVOptions(load_plugin("kv", config.kv_dtype), config.kv_granularity, config.method)
    return RunOptions(
        weights, kv, feed=config.feed, device=config.device, max_memory=config.max_memory, resume=config.resume
    )


def summary(facts: dict[str, Any], texts: Texts) -> list[str]:
    """A few lines about the damage; the whole is in the JSON files."""
    lines = [f"text: {texts.describe()}"]
    linears = facts.get("linears", {})
    if linears:
        errors = {n: f.get("output_error", f["weight_error"]) for n, f in linears.items()}
        worst = max(errors, key=lambda n: errors[n])
        mean = sum(errors.values()) / len(errors)
        figures = f"{mean:.3f} on average, {errors[worst]:.3f} at {worst}"
        lines.append(f"{len(errors)} linears: relative output error {figures}")
    if cold := facts.get("cold"):
        first = ", ".join(f"{n} ({tokens} tokens)" for n, tokens in list(cold.items())[:5])
        lines.append(f"{len(cold)} linears saw too little text, their weights alone decided: {first}")
    layers = facts.get("kv", {}).get("layers", {})
    if layers:
        means = [
            sum(f[key] for f in layers.values()) / len(layers)
            for key in ("attention_output_error", "attention_output_error_at_scale_1")
        ]
        silent = [f"{n} {k}" for n, f in layers.items() for k in ("k", "v") if f[k]["only_zeros"]]
        lines.append(f"KV cache: relative attention-output error {means[0]:.4f}, at scale 1.0 {means[1]:.4f}")
        if silent:
            lines.append(f"only zeros came by, scale 1.0 is written: {', '.join(silent[:5])}")
    return lines
