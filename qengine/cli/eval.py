"""`qengine eval`: what one setting costs beside another, in perplexity, KL divergence and top-1 agreement."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass

from qengine.cli.options import UNITS_NOTE, add_options, config_from, say
from qengine.config import EngineConfig, option
from qengine.errors import ConfigError

NAME = "eval"
HELP = "Measure what a setting costs: perplexity, KL divergence and top-1 agreement of two settings on any text"
SETTINGS, TEXT, OUTPUT = "the two settings", "text", "output"
SHARED = (
    "tokenizer", "revision", "trust_remote_code", "device", "block_size", "gpu_memory_utilization", "max_model_len",
    "max_num_batched_tokens",
)  # fmt: skip
"""Engine options that both sides take."""
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
MIN_TOKENS, MIN_WINDOW = 128, 16


@dataclass(frozen=True)
class EvalConfig:
    """The options of `qengine eval` beside those of the engine. What B isn't given, it takes from A."""

    kv_dtype_b: str | None = option(
        None, "KV dtype of B, the setting in question (default: A's)", group=SETTINGS, flags=("--kv-dtype",),
        metavar="NAME",
    )  # fmt: skip
    kv_dtype_a: str = option("auto", "KV dtype of A, the reference", group=SETTINGS, metavar="NAME")
    kv_scales_b: str | None = option(
        None,
        "Calibration file with KV scales of B, or its folder (default: A's for one model, else the one beside it)",
        group=SETTINGS,
        flags=("--kv-scales",),
        metavar="PATH",
    )
    kv_scales_a: str | None = option(
        None, "Calibration file with KV scales of A (default: the one beside the model)", group=SETTINGS, metavar="PATH"
    )
    quant_b: str | None = option(
        None,
        "Weight format of B. Default: what MODEL_B says, or A's where there is one model",
        group=SETTINGS,
        flags=("--quant",),
        metavar="NAME",
    )
    quant_a: str | None = option(
        None, "Weight format of A. Default: what its checkpoint says", group=SETTINGS, metavar="NAME"
    )
    dtype: str = option("auto", "Compute dtype of both", group=SETTINGS, choices=DTYPES)
    dtype_a: str | None = option(None, "Compute dtype of A (default: --dtype)", group=SETTINGS, choices=DTYPES)
    dtype_b: str | None = option(None, "Compute dtype of B (default: --dtype)", group=SETTINGS, choices=DTYPES)
    data: str | None = option(
        None,
        'A .txt (rows parted by lines of ---), .jsonl ({"text": ...} or {"messages": [...]} a line) or .parquet file, '
        "or a data set on the hub. Default: a built-in text of English, code and other languages, over 20,000 tokens",
        group=TEXT,
        metavar="FILE",
    )
    data_field: str | None = option(None, "Field of a row that holds its text", group=TEXT, metavar="NAME")
    max_tokens: int = option(32768, "Most tokens of text to use", group=TEXT)
    window: int | None = option(
        None,
        "Tokens that are scored together: the longest context. Default: 1024, at most the models' and --max-model-len",
        group=TEXT,
    )
    one_at_a_time: bool = option(
        False,
        "Never load both models at once: A's logits wait in a temporary file. Chosen by itself where both don't fit",
        group=TEXT,
    )
    json: str | None = option(None, "Write all figures as JSON", group=OUTPUT, metavar="FILE")
    html: str | None = option(
        None, "Write a page with plots; needs matplotlib (qengine-llm[report])", group=OUTPUT, metavar="FILE"
    )
    quiet: bool = option(False, "No progress bar", group=OUTPUT)

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", MIN_TOKENS), ("window", MIN_WINDOW)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is too small", have=value, need=f"at least {least}")
        if self.dtype != "auto" and None not in (self.dtype_a, self.dtype_b):
            raise ConfigError("--dtype is for both sides, and each has its own", have=f"--dtype {self.dtype}",
                              hint="leave --dtype out")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qengine eval [MODEL_A] [MODEL_B] [flags]"
    parser.epilog = (
        "A is the reference, B the setting in question. With one model, B is that model with --kv-dtype, --quant or "
        f"--dtype-b; with nothing that differs, A's perplexity alone is measured. {UNITS_NOTE}"
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL_A", help="Local folder or hub name; without one, the demo model"
    )
    parser.add_argument("model_b", nargs="?", metavar="MODEL_B", help="The model to compare with it (default: MODEL_A)")
    add_options(parser, EvalConfig)
    add_options(parser, EngineConfig, only=SHARED)


def run(args: argparse.Namespace) -> int:
    options = config_from(EvalConfig, args)
    configs = sides(options, config_from(EngineConfig, args), args.model_b)

    from qengine.prepare import prepare_model
    from qengine_calibration import eval_report, evaluate, progress, report
    from qengine_calibration.eval_text import TextSource

    json_file, html_file = report.check_writable(options.json), report.check_writable(options.html)
    if html_file is not None:
        report.require_matplotlib()
    source = TextSource.open(options.data, options.data_field, say)
    prepared = [prepare_model(c, say) for c in configs]
    with progress.bar("evaluate", quiet=options.quiet) as tick:
        result = evaluate.evaluate(
            prepared, source, max_tokens=options.max_tokens, window=options.window,
            one_at_a_time=options.one_at_a_time, say=say, tick=tick,
        )  # fmt: skip
    for line in eval_report.lines(result):
        print(line)
    if json_file is not None:
        report.write_text(json_file, json.dumps(result.summary(), indent=2, allow_nan=False) + "\n")
    if html_file is not None:
        report.write_text(html_file, eval_report.html_page(result))
    return 0


def sides(options: EvalConfig, shared: EngineConfig, model_b: str | None) -> list[EngineConfig]:
    """A's config, and B's unless it would be the same run. `shared` has the options of both, and A's model."""
    a = dataclasses.replace(
        shared, quantization=options.quant_a, kv_cache_dtype=options.kv_dtype_a,
        kv_scales=options.kv_scales_a, dtype=options.dtype_a or options.dtype,
    )  # fmt: skip
    same = model_b is None
    b = dataclasses.replace(
        a,
        model=a.model if same else model_b,
        quantization=options.quant_b or (a.quantization if same else None),
        kv_cache_dtype=options.kv_dtype_b or a.kv_cache_dtype,
        kv_scales=options.kv_scales_b or (a.kv_scales if same else None),
        dtype=options.dtype_b or options.dtype,
    )
    return [a] if same and a == b else [a, b]
