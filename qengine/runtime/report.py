"""The start-up report: the lines an operator looks for, made from the same numbers the engine runs with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from qengine.layers.attention import Attention
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import KVDtype, KVScales

GIB = 1 << 30


def gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB" if n >= GIB // 10 else f"{n / (1 << 20):.1f} MiB"


def weight_lines(seconds: float, by_format: Mapping[str, int], planned: int) -> list[str]:
    total = sum(by_format.values())
    schemes = ", ".join(f"{name} {gib(size)}" for name, size in sorted(by_format.items(), key=lambda x: -x[1]))
    return [
        f"Model loading took {gib(total)} and {seconds:.2f} seconds",
        f"Weights by scheme: {schemes} (planned {gib(planned)})",
    ]


def kernel_lines(leaves: Sequence[Leaf], layers: Sequence[Attention]) -> list[str]:
    """Which kernel runs each kind of linear and attention, counted."""
    linears = Counter(op.kernel for leaf in leaves if isinstance(leaf, Linear) for op in leaf.ops)
    attention = Counter(layer.cache.kernel for layer in layers if layer.cache is not None)
    lines = [f"Linear kernel: {kernel} ({n} modules)" for kernel, n in linears.most_common()]
    return lines + [f"Attention kernel: {kernel} ({n} layers)" for kernel, n in attention.most_common()]


def kv_lines(kv_tokens: int, max_model_len: int, concurrency: float, on_gpu: bool) -> list[str]:
    name = "GPU KV cache size" if on_gpu else "KV cache size"
    return [
        f"{name}: {kv_tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency:.2f}x",
    ]


def scale_lines(plugin: KVDtype, scales: Mapping[str, KVScales]) -> list[str]:
    """Every layer's KV scales and their source; one line where all are equal."""
    if plugin.max_value is None:
        return []
    seen: dict[str, list[str]] = {}
    for i, s in enumerate(scales.values()):
        text = f"k={_scale(s.k.tolist())}, v={_scale(s.v.tolist())}, source={s.source}"
        seen.setdefault(text, []).append(str(i))
    if len(seen) == 1:
        lines = [f"KV scales, all {len(scales)} layers: {next(iter(seen))}"]
    else:
        lines = [f"KV scales, layer {','.join(layers)}: {text}" for text, layers in seen.items()]
    note = plugin.uncalibrated_note()
    if note and any(s.source.startswith("default") for s in scales.values()):
        lines.append(f"WARNING: {note}")
    return lines


def _scale(values: Sequence[float]) -> str:
    """One number when all heads agree."""
    if len(set(values)) == 1:
        return f"{values[0]:.4g}"
    return f"{min(values):.4g}..{max(values):.4g} per head"


def agreement_line(name: str, planned: int, actual: int) -> str:
    """The plan beside what was allocated; more than 2 % apart is a warning."""
    off = abs(actual - planned) / max(planned, 1)
    mark = "" if off <= 0.02 else "WARNING: "
    return f"{mark}{name}: planned {gib(planned)}, allocated {gib(actual)} ({off:.1%} apart)"
