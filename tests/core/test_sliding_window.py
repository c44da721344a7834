"""Sliding-window groups: blocks leave with the window, hits need only what the window reaches."""

import pytest

from paged_simulator import build, drain, run_step, solo
from qengine.core.request import Request
from qengine.core.step import KVGroupSpec

SLIDING = [KVGroupSpec(20, [0])]
MIXED = [KVGroupSpec(20, [0]), KVGroupSpec(None, [1]), KVGroupSpec(50, [2])]


def test_blocks_outside_the_window_are_given_back() -> None:
    scheduler, simulator = build(groups=SLIDING, num_usable=5, block_size=8, batched=8)
    request = Request("r", list(range(60)), 100)
    scheduler.add(request)
    most = 0
    while step := scheduler.schedule():
        scheduler.manager.check()
        most = max(most, scheduler.manager.stats().blocks_used)
        [table] = request.block_tables
        first = SLIDING[0].first_block(step.sequences[0].start, 8)
        assert all(b == 0 for b in table[:first]) and all(table[first:])
        scheduler.update(step, simulator.run(step))
    assert request.output_token_ids == solo(request)
    assert most <= SLIDING[0].max_blocks(160, 8, 8) == 5


@pytest.mark.parametrize("groups", [SLIDING, MIXED], ids=["sliding", "mixed"])
@pytest.mark.parametrize("num_prompt", [39, 40, 41, 96])
def test_prefix_hits(groups: list[KVGroupSpec], num_prompt: int) -> None:
    scheduler, simulator = build(groups=groups, block_size=8, num_usable=120, batched=128)
    for name in ("a", "b"):
        request = Request(name, list(range(num_prompt)), 10)
        scheduler.add(request)
        drain(scheduler, simulator)
        assert request.output_token_ids == solo(request)
    whole = num_prompt // 8 * 8
    assert request.num_cached_tokens == min(whole, num_prompt - 1)


def test_a_hit_needs_the_window_and_nothing_before_it() -> None:
    scheduler, simulator = build(groups=MIXED, block_size=8, num_usable=60, batched=128)
    manager = scheduler.manager
    scheduler.add(Request("a", list(range(96)), 1))
    drain(scheduler, simulator)
    probe = Request("b", [*range(96), 7], 1)
    hit = manager.lookup(probe)
    assert hit.num_tokens == 96
    assert [table.count(0) for table in hit.blocks] == [9, 0, 5]
    manager._index.forget(hit.blocks[0][-1])
    assert manager.lookup(probe).num_tokens == 88, "the window before token 88 is whole"
    manager._index.forget(hit.blocks[0][9])
    assert manager.lookup(probe).num_tokens == 72, "every longer prefix needs one of the two"
    manager._index.forget(hit.blocks[1][3])
    assert manager.lookup(probe).num_tokens == 24, "full attention needs every block"


def test_a_fork_that_the_window_left_behind_starts_alone() -> None:
    scheduler, simulator = build(groups=MIXED, block_size=8, num_usable=60, batched=128, seqs=1)
    first, second = (Request(n, list(range(40)), 60, fork_of=f) for n, f in (("a", None), ("b", "a")))
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(40):
        run_step(scheduler, simulator, {})
    assert scheduler.manager.share_of(first, 39) is None
    drain(scheduler, simulator)
    assert second.output_token_ids == solo(second)
