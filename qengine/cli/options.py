"""Config fields as command-line arguments, and back. Every flag of `qengine serve` is made here from its field."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from qengine.config import NOT_BUILT, EngineConfig, Option, options
from qengine.core.kv_map import read_kv_map
from qengine.errors import ConfigError
from qengine.plugin.discovery import find_plugin

C = TypeVar("C")

SWITCH_VALUES = ("true", "false", "yes", "no", "on", "off", "0", "1")
NEGATIVE = re.compile(r"-\.?\d\S*")
"""What is a value and no flag: also -4G and -1e9, which argparse's own pattern does not know."""

UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
UNITS_NOTE = (
    "Integers may end in a unit: k, m, g count in thousands, K, M, G in 1024s (32k = 32000, 32K = 32768, 4G = 4GiB)."
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing its usage, and knows no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})
        self._negative_number_matcher = NEGATIVE

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        switch = re.fullmatch(r"(\S+): ignored explicit argument (.*)", message, re.DOTALL)
        if switch is not None:
            names = [name for name in switch[1].split("/") if name.startswith("--")] or [switch[1]]
            hint = f"{names[0]} for on, {names[-1]} for off" if len(names) > 1 else names[0]
            raise ConfigError(f"{names[0]} takes no value", have=switch[2], hint=hint)
        raise ConfigError(message)


class HelpFormatter(argparse.HelpFormatter):
    """Prints all spellings of a flag first and its metavar once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {self._format_args(action, _metavar(action))}"


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def number(text: str) -> int:
    """An integer with an optional unit: "512", "32k" = 32000, "32K" = 32768, "1.5G", "256MiB"."""
    short = text[:-2] if text.endswith("iB") and text[-3:-2].isupper() else text
    unit = UNITS.get(short[-1:])
    try:
        value = Fraction(short[:-1]) * unit if unit else Fraction(int(text))
    except ValueError:
        value = Fraction(1, 2)
    if value.denominator != 1:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}; need: a number such as 4096, 32k or 4G")
    return int(value)


def number_or_auto(text: str) -> int | None:
    return None if text == "auto" else number(text)


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        need = "one without a unit, such as 4 or 0.5"
        raise argparse.ArgumentTypeError(f"not a number: {text!r}; need: {need}") from None


def real_or_auto(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return real(text)
    except argparse.ArgumentTypeError as e:
        raise argparse.ArgumentTypeError(f"{e}, or auto") from None


def flags_of(field: dataclasses.Field[Any], opt: Option) -> tuple[str, ...]:
    """Every spelling of a field's flag, the preferred one first."""
    return (*opt.flags, "--" + field.name.replace("_", "-"))


def default_of(field: dataclasses.Field[Any], opt: Option) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "auto" if field.default is None and "auto" in (opt.metavar or "") else field.default


def add_options(parser: argparse.ArgumentParser, *configs: type, only: Collection[str] | None = None) -> None:
    """Add every option of the config classes, or those named by `only`, each in its help group, those that are not
    built last. A flag left out sets nothing, so that a field's default is stated once."""
    found = [(c, field, opt) for c in configs for field, opt in options(c) if only is None or field.name in only]
    groups: dict[str, argparse._ArgumentGroup] = {}
    for config, field, opt in sorted(found, key=lambda item: item[2].group == NOT_BUILT):
        if opt.group not in groups:
            groups[opt.group] = parser.add_argument_group(opt.group)
        hint = typing.get_type_hints(config)[field.name]
        groups[opt.group].add_argument(*flags_of(field, opt), dest=field.name, **_argument(field, opt, hint))


def _argument(field: dataclasses.Field[Any], opt: Option, hint: Any) -> dict[str, Any]:
    """The keywords of `add_argument` for one field."""
    args: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field, opt)}
    kind, many = _kind(hint)
    if kind is bool:
        return args | {"action": argparse.BooleanOptionalAction}
    if many:
        args |= {"nargs": "+", "action": "extend"}
    args["metavar"] = opt.metavar or ("{" + ",".join(opt.choices) + "}" if opt.choices else _default_metavar(kind))
    if opt.choices:
        return args | {"type": _one_of(opt.choices)}
    auto = "auto" in (opt.metavar or "")
    if kind is int:
        return args | {"type": number_or_auto if auto else number}
    if kind is float:
        return args | {"type": real_or_auto if auto else real}
    return args | {"type": str}


def _help(field: dataclasses.Field[Any], opt: Option) -> str:
    default = default_of(field, opt)
    text = opt.help.replace("%", "%%")
    if default in (None, (), [], "") or "default" in opt.help.lower():
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text} (default: {shown})"


def _kind(hint: Any) -> tuple[type, bool]:
    """The element type of a field, and whether it takes several values."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) in (tuple, list):
        return typing.get_args(hint)[0], True
    return hint, False


def _default_metavar(kind: type) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"unknown value {text!r}; need: {' | '.join(choices)}")
        return text

    return check


def config_from(config: type[C], args: argparse.Namespace) -> C:
    """The config that the given flags make; its own check raises ConfigError."""
    given = vars(args)
    hints = typing.get_type_hints(config)
    values = {f.name: given[f.name] for f, _ in options(config) if f.name in given}
    for name, value in values.items():
        if isinstance(value, list) and typing.get_origin(hints[name]) is not list:
            values[name] = tuple(value)
    return config(**values)


def find_named_plugins(config: EngineConfig) -> None:
    """Raise where --quantization or --kv-dtype names no plugin: looked up by name, at once, without importing torch."""
    if config.quantization is not None:
        find_plugin("weight", config.quantization)
    skipped = config.kv_cache_dtype_skip_layers
    for name in read_kv_map(config.kv_cache_dtype, EngineConfig.kv_cache_dtype, skipped).dtypes:
        find_plugin("kv", name)


def take_model(args: argparse.Namespace) -> None:
    """MODEL, given in its place, is --model. Raises ConfigError where a flag has taken it, or the other way round."""
    model = args.positional_model
    if model is None:
        _refuse_swallowed_model(args)
        return
    if getattr(args, "model", model) != model:
        raise ConfigError("two models", have=f"{model} and --model {args.model}", need="one")
    args.model = model


def _refuse_swallowed_model(args: argparse.Namespace) -> None:
    """`--served-model-name NAME MODEL` gives the flag two names: better said than served as the demo model."""
    if getattr(args, "model", None) is not None:
        return
    for name, values in vars(args).items():
        if not isinstance(values, list) or not values:
            continue
        flag, last = "--" + name.replace("_", "-"), values[-1]
        if os.path.isdir(last) or (len(values) > 1 and "/" in last):
            raise ConfigError(f"no MODEL is left: {flag} took {last!r}", hint=f"MODEL before {flag}, or --model")


def refuse_switch_value(args: argparse.Namespace) -> None:
    """Raise ConfigError for `--enforce-eager true` and the like, whose value would be taken for MODEL."""
    word = str(getattr(args, "positional_model", None))
    if word.lower() in SWITCH_VALUES and not os.path.isdir(word):
        hint = "--FLAG for on, --no-FLAG for off"
        raise ConfigError(f"{word!r} would be the MODEL; switches take no value", hint=hint)


def say(line: str) -> None:
    """Progress for people: stderr, so that stdout holds nothing but results."""
    print(line, file=sys.stderr, flush=True)


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Raise ConfigError for the first argument that nobody took, with the nearest flag that exists."""
    if not unknown:
        return
    first = next((a for a in unknown if a.startswith("-")), unknown[0])
    if not first.startswith("-"):
        raise ConfigError(f"unexpected argument {first!r}", hint=f"`{parser.prog} --help` lists what there is")
    flag = first.split("=")[0]
    known = [s for action in parser._actions for s in action.option_strings]
    near = difflib.get_close_matches(flag, known, 1, cutoff=0.6)
    raise ConfigError(f"unknown flag {flag}", hint=near[0] if near else f"`{parser.prog} --help` lists the flags")


def dashed(argv: Sequence[str]) -> list[str]:
    """Accept --max_model_len for --max-model-len, as other engines do; values are left alone."""
    out = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        out.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
    return out


def as_typed(message: str, argv: Sequence[str], *configs: type) -> str:
    """`message` with the spelling of each flag that the user chose: --kv-dtype, not --kv-cache-dtype."""
    typed = {arg.split("=")[0] for arg in argv if arg.startswith("--")}
    for names in (flags_of(field, opt) for config in configs for field, opt in options(config)):
        chosen = next((name for name in names if name in typed), None)
        for other in names if chosen else ():
            if other.startswith("--"):  # one that stands among its other spellings, as in --quant/-q, is left there
                message = re.sub(rf"(?<![\w/-]){other}(?![\w/-])", str(chosen), message)
    return message
