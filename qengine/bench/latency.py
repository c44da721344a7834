"""`qengine bench latency`: how long one batch takes from its start to its last token."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from qengine.bench.figures import percentile, samples, spread
from qengine.bench.offline import TimedEngine
from qengine.bench.options import LatencyOptions
from qengine.bench.prompts import asks, token_ids
from qengine.config import EngineConfig
from qengine.errors import ConfigError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def measure(config: EngineConfig, options: LatencyOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures under vLLM's names, in seconds (`avg_latency`, `latencies`, `percentiles`), and those of tokens in ms."""
    timed = TimedEngine(config, not options.disable_detokenize, say)
    vocab, longest = timed.engine.facts.vocab_size, timed.engine.facts.max_model_len
    if options.input_len + options.output_len > longest:
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len} do not fit the model's context",
            have=f"{longest} tokens",
            need=options.input_len + options.output_len,
        )
    seconds: list[float] = []
    all_timings = []
    for i in range(options.num_iters_warmup + options.num_iters):
        # Other prompts in each run, or the prefix cache would answer.
        made = asks("random", options.batch_size, options.input_len, options.output_len, 0.0, config.seed + i)
        timings = timed.run([(token_ids(ask, 0, vocab), ask.output_len) for ask in made])
        if i >= options.num_iters_warmup:
            seconds.append(max(t.e2el for t in timings))
            all_timings += timings
    found: dict[str, Any] = {
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": {str(p): percentile(seconds, p) for p in PERCENTILES},
        "ready_s": timed.ready_s,
    }
    for name, values in samples(all_timings).items():
        found |= spread(name, values, (50, 90, 99))
    return found


def lines(figures: dict[str, Any], options: LatencyOptions) -> list[str]:
    shown = ", ".join(f"p{p} {1e3 * v:.1f}" for p, v in figures["percentiles"].items())
    tpot = figures.get("median_tpot_ms")
    return [
        f"{options.batch_size} x {options.input_len} in, {options.output_len} out: "
        f"{1e3 * figures['avg_latency']:.1f} ms on average of {len(figures['latencies'])} ({shown})",
        f"first token {figures['median_ttft_ms']:.2f} ms"
        + (f", then {tpot:.3f} ms a token ({1e3 / tpot:,.1f} tokens/s a stream)" if tpot else "")
        + f"; ready after {figures['ready_s']:.1f} s",
    ]
