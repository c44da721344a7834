"""The config dicts of `quant_method` "fp8" (AutoFP8, DeepSeek, transformers) and "modelopt" (NVIDIA ModelOpt).

Tensors decide how a module is stored; what is read here are the block size, which no tensor states, and what the
tensors are checked against.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qengine.plugin.patterns import NameRule, read_dynamic

E4M3_NAMES = ("e4m3", "e4m3fn", "float8_e4m3fn", "fp8_e4m3", "fp8")
FORMAT_KEYS = ("fmt", "format", "checkpoint_format")
"""DeepSeek's, and GPTQModel's two."""
SCALE_METHODS = ("tensor", "row", "block")
"""GPTQModel's names of granularities."""
SKIP_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
"""AutoFP8's and vLLM's, transformers', and ModelOpt's two."""
MODELOPT_ALGOS = ("FP8",)
LEAST_BLOCK = 32
"""Blocks come in multiples of this many inputs, which the matrix units need."""


@dataclass(frozen=True)
class Fp8Config:
    """`block` is (outputs, inputs) that share a scale, None where the config states none; `static` None where nothing
    says how activations are scaled; `at_load`: no config at all, so 16-bit weights are to be converted; `divides`:
    weight_scale_inv is what its name says, the inverse of the scale (GPTQModel); `rules` are GPTQModel's for single
    modules."""

    block: tuple[int, int] | None = None
    static: bool | None = None
    skipped: tuple[str, ...] = ()
    at_load: bool = False
    divides: bool = False
    rules: tuple[NameRule, ...] = ()

    def of(self, name: str) -> list[tuple[Fp8Config, str]]:
        """What may hold for a module, and the words for where that is stated: its rules in file order, else the config
        itself. The first counts if it fits the tensors: saving with sorted keys puts rules out of order."""
        found = [rule for rule in self.rules if rule.settings is not None and rule.pattern.matches(name)]
        if not found:
            return [(self, "the config")]
        return [(replace(self, **dict(rule.settings or {})), f"the dynamic rule {rule.text!r}") for rule in found]

    def skip_rule(self, name: str) -> str | None:
        """The entry of the skip list that names this module, in any of its writers' readings: the full name or its
        end or beginning in whole parts, with or without "model.", or a wildcard; or a rule that takes it out."""
        for rule in self.skipped:
            short, own = rule.removeprefix("model."), name.removeprefix("model.")
            parts = own == short or own.endswith("." + short) or own.startswith(short + ".")
            if parts or fnmatch.fnmatchcase(name, rule) or fnmatch.fnmatchcase(own, short):
                return rule
        first = next((rule for rule in self.rules if rule.pattern.matches(name)), None)
        return first.text if first is not None and first.settings is None else None


def read_config(config: Mapping[str, Any] | None) -> Fp8Config:
    """`quant_method` "fp8". Raises ValueError naming field and value for what is not read here."""
    if config is None:
        return Fp8Config(at_load=True)
    stated = read_module(config, "")
    scheme = config.get("activation_scheme")
    if scheme not in (None, "static", "dynamic"):
        raise ValueError(f"activation_scheme {scheme!r} is not supported by fp8; need: static or dynamic")
    scale_fmt = config.get("scale_fmt")
    if scale_fmt is not None and str(scale_fmt).lower() not in ("ue8m0", "float", "float32"):
        raise ValueError(f"scale_fmt {scale_fmt!r} is not supported by fp8; need: ue8m0 or float32")
    block = stated.get("block")
    if block is not None and scheme == "static":
        raise ValueError(
            f"activation_scheme 'static' makes no sense with weight_block_size {list(block)}: activations of "
            "block-scaled weights are scaled by what they hold; need: dynamic"
        )
    return Fp8Config(
        block, None if scheme is None else scheme == "static", read_skips(config), divides=read_divides(config),
        rules=read_dynamic(config.get("dynamic"), read_module),
    )  # fmt: skip


def read_module(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What may differ between modules, as fields of Fp8Config: nothing, or `block`. `where` begins every message."""
    for key in FORMAT_KEYS:
        form = config.get(key)
        if form is not None and str(form).lower().removeprefix("torch.") not in E4M3_NAMES:
            raise ValueError(
                f"{where}{key} {form!r} is not supported by fp8; need: e4m3 (the finite kind that files hold, e4m3fn)"
            )
    bits, method = config.get("bits"), config.get("weight_scale_method")
    if bits is not None and str(bits) != "8":
        raise ValueError(f"{where}bits {bits!r} is not supported by fp8; need: 8")
    if method is not None and method not in SCALE_METHODS:
        need = " | ".join(SCALE_METHODS)
        raise ValueError(f"{where}weight_scale_method {method!r} is not supported by fp8; need: {need}")
    meaning = config.get("weight_scale_semantics")
    if meaning not in (None, "inverse"):
        raise ValueError(f"{where}weight_scale_semantics {meaning!r} is not supported by fp8; need: inverse")
    if "weight_block_size" in config:
        return {"block": read_block(config["weight_block_size"], where)}
    return {"block": None} if method in ("tensor", "row") else {}


def read_divides(config: Mapping[str, Any]) -> bool:
    """GPTQModel stores 1 / scale as weight_scale_inv and says so; everybody else stores the scale under that name."""
    if config.get("weight_scale_semantics") is not None:
        return True
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(name, str) and name.lower().startswith("gptqmodel") for name in names)


def read_block(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        need = "[outputs, inputs], such as [128, 128]"
        raise ValueError(f"{where}weight_block_size {value!r} makes no sense; need: {need}")
    if sizes[1] % LEAST_BLOCK:
        need = f"a multiple of {LEAST_BLOCK} inputs"
        raise ValueError(f"{where}weight_block_size {value!r} is not supported; need: {need}")
    return sizes[0], sizes[1]


def read_skips(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules left in 16 bits, from every key that writers use."""
    found: list[str] = []
    for key in SKIP_KEYS:
        names = config.get(key)
        if names is None:
            continue
        if isinstance(names, str) or not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{key} {names!r} makes no sense; need: a list of module names")
        found.extend(names)
    return tuple(dict.fromkeys(found))


def read_modelopt(config: Mapping[str, Any] | None) -> Fp8Config:
    """`quant_method` "modelopt": config.json's quantization_config, or hf_quant_config.json with its own nesting.

    Raises ValueError naming `quant_algo` and its value for every algorithm but FP8. ModelOpt's config_groups repeat
    the algorithm and lack what a compressed-tensors reader needs; they are not looked at.
    """
    if config is None:
        return Fp8Config()
    inner = config.get("quantization")
    settings: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    algo = settings.get("quant_algo")
    name = algo.upper() if isinstance(algo, str) else algo
    if name not in MODELOPT_ALGOS:
        raise ValueError(f"quant_algo {algo!r} is not supported by modelopt; need: {' or '.join(MODELOPT_ALGOS)}")
    return Fp8Config(skipped=read_skips(settings))
