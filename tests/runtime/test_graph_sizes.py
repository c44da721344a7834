"""Which decode batch sizes get a CUDA graph, and what they cost; pure numbers."""

import pytest

from qengine.runtime.graphs import GRAPH_BYTES, LARGEST, graph_bytes, graph_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 1000])
def test_every_batch_finds_a_size_and_the_padding_stays_small(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST) and sizes[0] == 1
    for n in range(1, sizes[-1] + 1):
        size = next(s for s in sizes if s >= n)
        assert size - n < 16 and (n > 8 or size <= 2 * n)


def test_bytes_count_buffers_and_graphs() -> None:
    one = graph_bytes(1, hidden=64, vocab=1000, itemsize=2, table_entries=10)
    assert one == 4 * 1000 + 2 * 64 + 4 * 10 + GRAPH_BYTES
    assert graph_bytes(256, 64, 1000, 2, 10) > 256 * 4 * 1000
