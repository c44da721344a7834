"""Every engine option, once: name, default, help, command-line spelling.

`qengine serve --help`, the README's flag table and the keywords of `LLM(...)` are all made from these fields.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qengine.errors import ConfigError

OPTION = "qengine.option"


@dataclass(frozen=True)
class Option:
    """How a config field appears on the command line."""

    help: str
    group: str
    flags: tuple[str, ...] = ()
    """Spellings beside --field-name; the first one given here is shown first."""
    choices: tuple[str, ...] = ()
    metavar: str | None = None


def option(
    default: Any,
    help: str,
    *,
    group: str,
    flags: Sequence[str] = (),
    choices: Sequence[str] = (),
    metavar: str | None = None,
) -> Any:
    meta = {OPTION: Option(help, group, tuple(flags), tuple(choices), metavar)}
    return dataclasses.field(default=default, metadata=meta)


MODEL, MEMORY, SCHEDULING, RUN, NOT_BUILT = "model", "memory", "scheduling", "execution", "not built yet"


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Frozen; derived values are computed where they are used."""

    model: str | None = option(
        None, "Local folder or hub name; without one, the demo model (SmolLM2-135M-Instruct)", group=MODEL
    )
    tokenizer: str | None = option(None, "Folder or hub name of the tokenizer (default: the model's)", group=MODEL)
    revision: str | None = option(None, "Branch, tag or commit of a hub model", group=MODEL)
    trust_remote_code: bool = option(
        False, "Run Python code that comes with the model. Off by default; said loudly when on", group=MODEL
    )
    dtype: str = option(
        "auto",
        "Compute dtype. auto: the checkpoint's own where the device runs it well",
        group=MODEL,
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = option(
        None,
        "Weight format, a plugin name (see `qengine plugins`). Default: what the checkpoint says. On a 16-bit "
        "checkpoint, awq and gptq first make a 4-bit copy in the cache, fp8 converts as it loads",
        group=MODEL,
        flags=("--quant", "-q"),
        metavar="NAME",
    )
    load_format: str = option(
        "auto",
        "Where weights come from. auto: safetensors files, else pickled ones (.bin, .pt), which are converted once to "
        "safetensors in the cache; pt, npcache (that cache under another name): pickled ones even beside safetensors; "
        "dummy: random ones",
        group=MODEL,
        choices=("auto", "safetensors", "pt", "npcache", "dummy"),
    )
    lm_head_int8: bool = option(
        True,
        "With quantised weights on a CPU: multiply the few rows of a decode step by an 8-bit copy of the 16-bit output "
        "layer, where that is faster. Off: always exact",
        group=MODEL,
    )
    seed: int = option(
        0, "Seed of what requests without one draw from, in turn (equal ones differ), and of dummy weights", group=RUN
    )
    device: str = option("auto", "Device to run on", group=RUN, choices=("auto", "cuda", "cpu"))
    enforce_eager: bool = option(False, "Never capture CUDA graphs", group=RUN)
    kv_cache_dtype: str = option(
        "auto",
        "KV-cache dtype, a plugin name: auto (compute dtype), fp8 = fp8_e4m3, fp8_e5m2. Keys and values apart: "
        "k=NAME,v=NAME. Exceptions behind it: fp8,layers.0-1=auto,layers.29.v=auto,sliding_window=auto",
        group=MEMORY,
        flags=("--kv-dtype",),
        metavar="NAME",
    )
    kv_cache_dtype_skip_layers: str | None = option(
        None,
        "Layers whose KV cache stays auto: numbers and sliding_window, such as 0,29",
        group=MEMORY,
        metavar="LAYERS",
    )
    kv_scales: str | None = option(
        None,
        "Calibration file with KV scales, or its folder (see `qengine calibrate`). Default: the one beside the model, "
        "if there is one",
        group=MEMORY,
        metavar="PATH",
    )
    block_size: int = option(16, "Tokens of one KV block", group=MEMORY)
    gpu_memory_utilization: float = option(
        0.92, "Share of the device's memory that qengine may use, at most what is free at start", group=MEMORY
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache in bytes (K, M, G suffixes are powers of 1024); wins over the share", group=MEMORY
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output in tokens. auto (default): the largest that fits, at most the model's own",
        group=MEMORY,
        metavar="N|auto",
    )
    cpu_offload_gb: float | None = option(
        0.0,
        "GiB of weights to keep in pinned host memory, in whole decoder layers spread over the model; every step "
        "copies them to the GPU ahead of use. auto: as few as it takes",
        group=MEMORY,
        metavar="N|auto",
    )
    offload_layers: str | None = option(
        None,
        "What --cpu-offload-gb may move: names of modules or patterns, such as *.mlp,model.layers.1?. Default: all "
        "linears of all decoder layers. The experts of a layer go together",
        group=MEMORY,
        metavar="NAMES",
    )
    expert_slots: int | None = option(
        0,
        "With --cpu-offload-gb on a mixture of experts: offload experts only, and keep so many of each offloaded layer "
        "on the GPU too, those used last. Steps of up to N / (experts a token) tokens then copy only experts that they "
        "ask for and that have no slot, larger steps whole layers. auto: as many as fit. 0: every step copies whole "
        "layers",
        group=MEMORY,
        metavar="N|auto",
    )
    swap_space: float = option(
        0.0,
        "GiB of pinned host memory for KV blocks of preempted sequences and evicted prefixes, which come back as they "
        "were. 0: none, that memory belongs to others unless asked for",
        group=MEMORY,
        metavar="GIB",
    )
    swap_policy: str = option(
        "auto",
        "What becomes of preempted sequences with --swap-space: swap, recompute, or auto, whichever was quicker when "
        "measured at start",
        group=MEMORY,
        choices=("auto", "swap", "recompute"),
    )
    enable_prefix_caching: bool = option(True, "Reuse cached blocks of equal prefixes", group=SCHEDULING)
    max_num_seqs: int = option(256, "Most sequences in one step", group=SCHEDULING)
    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step (default: 8192, on GPUs below 32 GiB 2048, on a CPU 512)", group=SCHEDULING
    )
    scheduling_policy: str = option(
        "fcfs", "Order of waiting requests", group=SCHEDULING, choices=("fcfs", "priority")
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule and start a step while the one before it still runs (default: on CUDA on, on a CPU off)",
        group=SCHEDULING,
    )
    tensor_parallel_size: int = option(1, "Only 1 for now", group=NOT_BUILT, flags=("-tp",))
    pipeline_parallel_size: int = option(1, "Only 1 for now", group=NOT_BUILT, flags=("-pp",))
    speculative_config: str | None = option(None, "Speculative decoding; refused for now", group=NOT_BUILT)
    enable_lora: bool = option(False, "LoRA adapters; refused for now", group=NOT_BUILT)

    def __post_init__(self) -> None:
        check_config(self)


def options(cls: type) -> list[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a config class with their options, in order."""
    return [(f, f.metadata[OPTION]) for f in dataclasses.fields(cls) if OPTION in f.metadata]


TYPE_NAMES = {str: "a text", int: "an integer", float: "a number", bool: "True or False", types.NoneType: "None"}
LEAST = {
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "kv_cache_memory_bytes": 1,
    "max_model_len": 2,  # a prompt of one token and one to answer
}

MOST_GIB = f"0 <= GiB < {2**30}"


def _check_value(flag: str, value: object, hint: Any) -> None:
    """Raise ConfigError for a value of the wrong type (Python callers can give anything) and for a blank text."""
    kinds = typing.get_args(hint) or (hint,)
    whole = isinstance(value, int) and not isinstance(value, bool) and float in kinds
    if not whole and type(value) not in kinds:
        need = " or ".join(TYPE_NAMES[kind] for kind in kinds)
        raise ConfigError(f"{flag} has the wrong type", have=repr(value)[:80], need=need)
    if isinstance(value, str) and not value.strip():
        raise ConfigError(f"{flag} is empty", hint=f"leave {flag} out")


def check_config(c: EngineConfig) -> None:
    """Raise ConfigError for the first option that is of the wrong type, out of range or not built yet."""
    hints = typing.get_type_hints(EngineConfig)
    for f, opt in options(EngineConfig):
        value = getattr(c, f.name)
        flag = "--" + f.name.replace("_", "-")
        _check_value(flag, value, hints[f.name])
        if opt.group == NOT_BUILT and value != f.default:
            raise ConfigError(f"{flag} is not built yet", have=value, need=f.default, hint=f"leave {flag} out")
        if opt.choices and value not in opt.choices:
            raise ConfigError(f"{flag}: unknown value", have=repr(value), need=" | ".join(opt.choices))
    for name, low in LEAST.items():
        value = getattr(c, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} is too small", have=value, need=f">= {low}")
    if c.block_size & (c.block_size - 1) or c.block_size > 256:
        raise ConfigError("--block-size must be a power of two up to 256", have=c.block_size, need="1, 2, 4 ... 256")
    if not 0 < c.gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization is a share", have=c.gpu_memory_utilization, need="0 < x <= 1")
    if c.cpu_offload_gb is not None and not 0 <= c.cpu_offload_gb < 2**30:
        raise ConfigError("--cpu-offload-gb is out of range", have=c.cpu_offload_gb, need=f"{MOST_GIB}, or auto")
    if c.offload_layers is not None and c.cpu_offload_gb == 0:
        raise ConfigError(
            "--offload-layers chooses what --cpu-offload-gb may move", have="--cpu-offload-gb 0", need="N or auto"
        )
    if c.expert_slots is not None and not 0 <= c.expert_slots < 2**31:
        need = f"0 to {2**31 - 1} experts, or auto"
        raise ConfigError("--expert-slots is out of range", have=c.expert_slots, need=need)
    if c.expert_slots != 0 and c.cpu_offload_gb == 0:
        raise ConfigError(
            "--expert-slots are for experts that --cpu-offload-gb moves", have="--cpu-offload-gb 0", need="N or auto"
        )
    if not 0 <= c.swap_space < 2**30:
        raise ConfigError("--swap-space is out of range", have=c.swap_space, need=MOST_GIB)
    if c.swap_policy == "swap" and not c.swap_space:
        raise ConfigError("--swap-policy swap needs host memory", have="--swap-space 0", need="--swap-space GIB")
    if not -(2**63) <= c.seed < 2**64:
        raise ConfigError("--seed is out of range", have=c.seed, need="a 64-bit integer")
    if c.kv_scales is not None and c.load_format == "dummy":
        raise ConfigError(
            "--kv-scales were measured with a model's own weights", have="--load-format dummy",
            hint="leave --kv-scales out",
        )  # fmt: skip
    if c.revision is not None and c.model is None:
        raise ConfigError("--revision is for hub models, and no model is named", hint="--model NAME")
