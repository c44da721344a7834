"""AWQ's own config dict, in the spellings of its writers.

AutoAWQ up to 0.1.8 wrote `w_bit`, `q_group_size` and an upper-case version; GPTQModel and transformers 5 write the
version as `format` or `checkpoint_format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

READ_AS_GEMM = ("gemm", "exllama", "ipex")
"""exllama and ipex are kernels: their files hold the gemm layout."""
OTHER_LAYOUTS = ("gemv", "gemv_fast", "marlin", "llm-awq")


@dataclass(frozen=True)
class AwqConfig:
    """`group_size` and `zero_point` are None when nothing states them (no config at all): the tensors tell."""

    group_size: int | None = None
    zero_point: bool | None = None
    skipped: tuple[str, ...] = ()


def first(config: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    """The first of the spellings that is there with its value; the last with None otherwise."""
    for key in keys:
        if config.get(key) is not None:
            return key, config[key]
    return keys[-1], None


def read_config(config: Mapping[str, Any] | None) -> AwqConfig:
    """Raises ValueError naming field and value for what is not read here."""
    if config is None:
        return AwqConfig()
    check_layout(config)
    key, bits = first(config, "w_bit", "bits")
    if bits is not None and bits != 4:
        raise ValueError(f"{key} {bits!r} is not supported by awq; AWQ's gemm layout holds 4-bit weights, need: 4")
    key, group_size = first(config, "q_group_size", "group_size")
    if group_size is not None and (
        not isinstance(group_size, int) or isinstance(group_size, bool) or (group_size < 1 and group_size != -1)
    ):
        raise ValueError(f"{key} {group_size!r} makes no sense; need: a positive number, or -1 for one group")
    zero_point = config.get("zero_point")
    if zero_point is not None and not isinstance(zero_point, bool):
        raise ValueError(f"zero_point {zero_point!r} makes no sense; need: true or false")
    skipped = config.get("modules_to_not_convert") or ()
    if isinstance(skipped, str) or not all(isinstance(s, str) for s in skipped):
        raise ValueError(f"modules_to_not_convert {skipped!r} makes no sense; need: a list of module names")
    return AwqConfig(group_size, zero_point, tuple(skipped))


def check_layout(config: Mapping[str, Any]) -> None:
    """Refuse every layout but gemm by name."""
    key, method = first(config, "method", "quant_method")
    if method is not None and str(method).lower() not in ("awq", "auto_awq"):
        raise ValueError(f"{key} {method!r} is not awq: these weights are in another format")
    backend = str(config.get("backend") or "").lower()
    if backend in OTHER_LAYOUTS:
        raise ValueError(f"backend {backend!r} is not supported by awq; need: weights in AutoAWQ's gemm layout")
    for key in ("version", "format", "checkpoint_format"):
        value = config.get(key)
        if value is not None and str(value).lower() not in READ_AS_GEMM:
            raise ValueError(
                f"{key} {value!r} is not supported by awq; need: gemm (exllama and ipex are read as gemm); "
                "the model quantised again with version gemm would work"
            )
