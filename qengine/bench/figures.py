"""From the times at which tokens came to the figures that are shown and written. Names follow vLLM's files."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between tokens",
    "e2el": "end to end",
}


@dataclass
class Timing:
    """One request. `start` and `times` are seconds of one clock; `times` are those at which pieces of the answer came,
    which are single tokens as a rule. `tokens`: generated in all. `error`: why it failed."""

    prompt_tokens: int = 0
    start: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.start

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens, "output_tokens": self.tokens, "error": self.error,
            "ttft": self.ttft if self.times else None, "itl": self.itl,
        }  # fmt: skip


def percentile(values: Sequence[float], p: float) -> float:
    """Linear between the two nearest, as numpy's."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def samples(done: Sequence[Timing]) -> dict[str, list[float]]:
    """Seconds of each metric over all requests that brought at least one token."""
    return {
        "ttft": [t.ttft for t in done],
        "tpot": [x for t in done if (x := t.tpot) is not None],
        "itl": [x for t in done for x in t.itl],
        "e2el": [t.e2el for t in done],
    }


def spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, standard deviation and percentiles in milliseconds; empty without values."""
    if not seconds:
        return {}
    ms = [1e3 * s for s in seconds]
    found = {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
    }
    return found | {f"p{p:g}_{name}_ms": percentile(ms, p) for p in percentiles}


def totals(timings: Sequence[Timing], duration: float) -> dict[str, float]:
    """Counts and rates over the whole run of `duration` seconds."""
    done = [t for t in timings if t.error is None and t.times]
    given, made = sum(t.prompt_tokens for t in done), sum(t.tokens for t in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(done) / duration,
        "output_throughput": made / duration,
        "total_token_throughput": (given + made) / duration,
    }


def summary(
    timings: Sequence[Timing], duration: float, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, float]:
    done = [t for t in timings if t.error is None and t.times]
    found = totals(timings, duration)
    for name, seconds in samples(done).items():
        if name in metrics:
            found |= spread(name, seconds, percentiles)
    return found


def table(figures: dict[str, float], metrics: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """Markdown: the totals as lines, then a row for each metric."""
    lines = [
        f"{figures['completed']:,.0f} requests in {figures['duration']:.2f} s, {figures['failed']:,.0f} failed; "
        f"{figures['total_input_tokens']:,.0f} tokens in, {figures['total_output_tokens']:,.0f} out",
        f"{figures['request_throughput']:.2f} requests/s, {figures['output_throughput']:,.1f} output tokens/s, "
        f"{figures['total_token_throughput']:,.1f} tokens/s in all",
        "",
        "| ms | mean | median | std | " + " | ".join(f"p{p:g}" for p in percentiles) + " |",
        "|---|" + "---|" * (3 + len(percentiles)),
    ]
    for name in metrics:
        keys = [f"{what}_{name}_ms" for what in ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))]
        if all(key in figures for key in keys):
            lines.append(f"| {NAMES[name]} ({name}) | " + " | ".join(f"{figures[k]:.2f}" for k in keys) + " |")
    return lines


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
