"""`qengine bench throughput`: all prompts are there at the start; how soon is everything answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qengine.bench.figures import NAMES, summary, table
from qengine.bench.offline import TimedEngine
from qengine.bench.options import ThroughputOptions, percentiles_of
from qengine.bench.prompts import Ask, asks, token_ids
from qengine.config import EngineConfig

WARM_PROMPTS, WARM_TOKENS = 8, 8


def measure(config: EngineConfig, options: ThroughputOptions, say: Callable[[str], None]) -> dict[str, Any]:
    timed = TimedEngine(config, not options.disable_detokenize, say)
    facts = timed.engine.facts
    o, room = options, facts.max_model_len - options.random_prefix_len
    if o.dataset_name == "random" and o.input_len + o.output_len > room:
        say(f"WARNING: prompts and answers are cut to the model's context of {facts.max_model_len} tokens")
    made = asks(o.dataset_name, o.num_prompts, o.input_len, o.output_len, o.random_range_ratio, config.seed, room)

    def prompt(ask: Ask, most: int) -> tuple[list[int], int]:
        return token_ids(ask, options.random_prefix_len, facts.vocab_size), min(ask.output_len, most)

    warm_prompts = min(WARM_PROMPTS, o.num_prompts)
    for i in range(options.num_warmups):
        warm = asks("random", warm_prompts, o.input_len, o.output_len, 0.0, config.seed + 1 + i, room)
        timed.run([prompt(ask, WARM_TOKENS) for ask in warm])
    prompts = [prompt(ask, ask.output_len) for ask in made]
    timings = timed.run(prompts)
    elapsed = max(t.times[-1] for t in timings) - timings[0].start
    found: dict[str, Any] = summary(timings, elapsed, list(NAMES), percentiles_of(options.metric_percentiles))
    stats = timed.engine.stats()
    return {
        "elapsed_time": elapsed,
        "num_requests": len(timings),
        "total_num_tokens": int(found["total_input_tokens"] + found["total_output_tokens"]),
        "requests_per_second": found["request_throughput"],
        "tokens_per_second": found["total_token_throughput"],
        "ready_s": timed.ready_s,
        "kv_tokens": facts.kv_tokens,
        "preemptions": stats.num_preemptions,
        "synchronous_steps": stats.synchronous_steps,
        "kernels_compiled": stats.kernels_compiled,
        **found,
    }


def lines(figures: dict[str, Any], options: ThroughputOptions) -> list[str]:
    return table(figures, list(NAMES), percentiles_of(options.metric_percentiles))
