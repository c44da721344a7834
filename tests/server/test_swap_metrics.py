"""What the KV swap tier does is in the metrics, under vLLM's names where it had some."""

from __future__ import annotations

import pytest

from qengine.messages import EngineStats
from qengine.server.metrics import Metrics

STATS = EngineStats(
    host_blocks_total=40, host_blocks_used=10, host_blocks_cached=7, num_swapped=2, num_preemptions=9,
    preemptions_swapped=6, recomputed_tokens=123, swapped_out_bytes=4096, swapped_in_bytes=2048,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_requests_swapped", 2),
        ("cpu_cache_usage_perc", 0.25),
        ("cpu_cache_blocks", 40),
        ("cpu_cache_blocks_cached", 7),
        ("num_preemptions_total", 9),
        ("num_preemptions_swapped_total", 6),
        ("recomputed_tokens_total", 123),
        ("kv_swap_out_bytes_total", 4096),
        ("kv_swap_in_bytes_total", 2048),
    ],
)
def test_each_has_its_own_value(name: str, value: float) -> None:
    exposed = Metrics("toy", lambda: STATS).expose().decode()
    assert f'qengine:{name}{{model_name="toy"}} {float(value)}' in exposed.splitlines()
    idle = Metrics("toy", EngineStats).expose().decode()
    assert f'qengine:{name}{{model_name="toy"}} 0.0' in idle.splitlines()
