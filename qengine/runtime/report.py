"""The start-up report: the lines an operator looks for, made from the same numbers the engine runs with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from qengine.layers.attention import Attention
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import KVScales
from qengine.runtime.kv_dtypes import KVDtypes, where

GIB = 1 << 30
REMOTE_CODE = "WARNING: --trust-remote-code is on: Python code that came with the model runs here"


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


def scale_lines(kv: KVDtypes, scales: Mapping[str, KVScales]) -> list[str]:
    """The KV scales of every layer that takes some: a line for each source, layers with equal ones together."""
    seen: dict[str, dict[str, list[int]]] = {}
    notes: dict[str, None] = {}
    for i, (pair, s) in enumerate(zip(kv.sides.values(), scales.values(), strict=True)):
        scaled = [(p, x) for p, x in zip(pair, (("k", s.k), ("v", s.v)), strict=True) if p.max_value is not None]
        if not scaled:
            continue
        text = ", ".join(f"{side}={_scale(values.tolist())}" for _, (side, values) in scaled)
        seen.setdefault(s.source, {}).setdefault(text, []).append(i)
        if s.source.startswith("default"):
            notes |= dict.fromkeys(note for p, _ in scaled if (note := p.uncalibrated_note()))
    lines = []
    for source, found in seen.items():
        parts = [f"{_layers(layers, len(scales))} {text}" for text, layers in found.items()]
        lines.append(f"KV scales, source={source}: {'; '.join(parts)}")
    return lines + [f"WARNING: {note}" for note in notes]


def _layers(layers: Sequence[int], of: int) -> str:
    return f"all {of} layers" if len(layers) == of else where(layers)


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


def graph_memory_line(planned: int, taken: int, pools: int, total: int) -> str:
    """What captured graphs took of a device of `total` bytes beside their plan; 2 % of the device more is a warning.

    `taken` is by how much free memory fell, `pools` what torch holds of that. The rest is the driver's, which only free
    memory shows, so that it counts what other processes did meanwhile too.
    """
    line = f"CUDA graphs: planned {gib(planned)}, taken {gib(max(taken, 0))}"
    too_much = planned + 0.02 * total
    if max(taken, pools) <= too_much:
        return line
    return f"WARNING: {line}" + (f" ({gib(pools)} by torch, the rest by the driver or by other processes)"
                                 if pools <= too_much else "")  # fmt: skip
