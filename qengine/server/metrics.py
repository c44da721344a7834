"""Prometheus metrics under vLLM's names with the prefix `qengine:`, so that its dashboards need one replacement.

Gauges and counters come from the engine's own statistics at the moment of the scrape; latencies and finish reasons
are measured here, where the client sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qengine.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "qengine:"
LABEL = "model_name"

# bucket boundaries in seconds, vLLM's
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


Value = Callable[[EngineStats], float]

GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("num_requests_running", "Requests in the running batch", lambda s: s.num_running),
    ("num_requests_waiting", "Requests that wait to be scheduled", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "KV-cache usage, 1 means full",
        lambda s: _share(s.kv_blocks_used, s.kv_blocks_total),
    ),
    ("kv_cache_blocks", "KV blocks in the pool", lambda s: s.kv_blocks_total),
    ("kv_cache_blocks_used", "KV blocks that running requests hold", lambda s: s.kv_blocks_used),
    ("kv_cache_blocks_cached", "KV blocks free but kept for prefix hits", lambda s: s.kv_blocks_cached),
    ("kv_slots_allocated", "Token slots in blocks that running requests hold", lambda s: s.kv_slots_allocated),
    ("kv_slots_wasted", "Token slots allocated but not written", lambda s: s.kv_slots_wasted),
    (
        "kv_slots_wasted_perc",
        "Share of allocated token slots that are not written",
        lambda s: _share(s.kv_slots_wasted, s.kv_slots_allocated),
    ),
    ("num_requests_swapped", "Preempted requests whose K/V waits in host memory", lambda s: s.num_swapped),
    (
        "cpu_cache_usage_perc",
        "Usage of the KV blocks in host memory by preempted requests, 1 means full",
        lambda s: _share(s.host_blocks_used, s.host_blocks_total),
    ),
    ("cpu_cache_blocks", "KV blocks in host memory", lambda s: s.host_blocks_total),
    ("cpu_cache_blocks_cached", "KV blocks in host memory kept for prefix hits", lambda s: s.host_blocks_cached),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.prefix_cache_hits),
    (
        "expert_cache_queries",
        "Experts that layers looked for in --expert-slots, each once a step",
        lambda s: s.expert_cache_queries,
    ),
    ("expert_cache_hits", "Experts that had a slot", lambda s: s.expert_cache_hits),
    ("num_preemptions", "Preemptions", lambda s: s.num_preemptions),
    ("num_preemptions_swapped", "Preemptions after which K/V was kept", lambda s: s.preemptions_swapped),
    ("recomputed_tokens", "Tokens that preempted requests had to compute again", lambda s: s.recomputed_tokens),
    ("kv_swap_out_bytes", "Bytes of K/V copied to host memory", lambda s: s.swapped_out_bytes),
    ("kv_swap_in_bytes", "Bytes of K/V copied back from host memory", lambda s: s.swapped_in_bytes),
    ("prompt_tokens", "Prompt tokens processed", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated", lambda s: s.generation_tokens),
    ("nonfinite_requests", "Requests ended because their logits were not finite", lambda s: s.nonfinite_requests),
    ("engine_steps", "Steps of the engine", lambda s: s.steps),
    (
        "engine_synchronous_steps",
        "Steps that had to wait for the last one's tokens, although scheduling is asynchronous",
        lambda s: s.synchronous_steps,
    ),
    ("kernels_compiled", "Kernels compiled while serving: each held up a step", lambda s: s.kernels_compiled),
)


class EngineCollector(Collector):
    """Turns the newest EngineStats into metrics at each scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.model_name = model_name
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self.stats()
        for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, value in rows:
                family = kind(PREFIX + name, text, labels=[LABEL])
                family.add_metric([self.model_name], value(stats))
                yield family


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, stats))
        self.model_name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, text, [LABEL], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self.first_token = histogram("time_to_first_token_seconds", "Time to first token", FIRST_TOKEN_BUCKETS)
        self.inter_token = histogram("inter_token_latency_seconds", "Time between tokens", INTER_TOKEN_BUCKETS)
        self.request = histogram("e2e_request_latency_seconds", "Time of whole requests", REQUEST_BUCKETS)
        self._success = Counter(
            PREFIX + "request_success",
            "Finished requests by the reason they ended",
            [LABEL, "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)

    def finished(self, reason: str) -> None:
        self._success.labels(self.model_name, reason).inc()

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class RequestTimer:
    """Feeds the latency histograms for one sequence; times are of one monotonic clock, in seconds."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self.metrics = metrics
        self.arrival = arrival
        self._last: float | None = None

    def tokens(self, count: int, now: float) -> None:
        """`count` tokens came at once; each of them after the first ever counts as one interval."""
        if not count:
            return
        if self._last is None:
            self.metrics.first_token.observe(now - self.arrival)
            self._last = now
            count -= 1
        for _ in range(count):
            self.metrics.inter_token.observe((now - self._last) / count)
        self._last = now

    def finished(self, reason: str, now: float) -> None:
        self.metrics.request.observe(now - self.arrival)
        self.metrics.finished(reason)
