"""Which decode batch sizes get a CUDA graph, and what they cost; pure numbers."""

from pathlib import Path
from typing import Any

import pytest

from published_models import write_config
from qengine.config import EngineConfig
from qengine.core.memory import ActivationShape, activation_bytes
from qengine.runtime.graphs import GRAPH_BYTES, LARGEST, graph_bytes, graph_sizes
from qengine.runtime.plan_report import plan_report
from qengine.runtime.prompt_graphs import prompt_graph_bytes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 1000])
def test_every_batch_finds_a_size_and_the_padding_stays_small(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST) and sizes[0] == 1
    for n in range(1, sizes[-1] + 1):
        size = next(s for s in sizes if s >= n)
        assert size - n < 16 and (n > 8 or size <= 2 * n)


def test_bytes_count_buffers_and_graphs() -> None:
    one = graph_bytes(1, hidden=64, itemsize=2, table_entries=10)
    assert one == 2 * 64 + 4 * 10 + GRAPH_BYTES
    assert graph_bytes(256, 64, 2, 10) == 256 * (2 * 64 + 4 * 10) + GRAPH_BYTES * len(graph_sizes(256))


@pytest.mark.parametrize(("seqs", "tokens"), [(256, 2048), (256, 16), (1, 2048)])
def test_a_plan_counts_the_largest_captured_step(tmp_path: Path, seqs: int, tokens: int) -> None:
    write_config(tmp_path, "Qwen2.5-7B", "awq")
    options: dict[str, Any] = {"model": str(tmp_path), "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    found = dict(plan_report(EngineConfig(**options), "4090").memory.lines)["graphs"]
    shape = ActivationShape(3584, 18944, 152064, 28, 4, 128, 2, 2, workspace=64 << 20)
    buffers = graph_bytes(seqs, 3584, 2, 32768 // 16) + prompt_graph_bytes(tokens, 3584, 2)
    step = activation_bytes(shape, 512 if tokens >= 512 else seqs, 0)
    assert found == pytest.approx(buffers + step, rel=0.001)
