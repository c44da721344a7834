"""n > 1: siblings share the prompt's blocks and copy what they write."""

import pytest

from paged_simulator import build, drain, run_step, solo
from qengine.core.request import Request
from qengine.core.step import KVGroupSpec

WINDOWS = {"full": [KVGroupSpec(None, [0])], "mixed": [KVGroupSpec(20, [0]), KVGroupSpec(None, [1])]}


def family(num_prompt: int, n: int, max_tokens: int = 30) -> list[Request]:
    prompt = list(range(num_prompt))
    return [Request(f"c{i}", prompt, max_tokens, fork_of="c0" if i else None) for i in range(n)]


@pytest.mark.parametrize("groups", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 33, 100])
def test_siblings_share_the_prompt(num_prompt: int, caching: bool, groups: list[KVGroupSpec]) -> None:
    scheduler, simulator = build(groups=groups, num_usable=100, batched=48, caching=caching)
    requests = family(num_prompt, 4)
    for request in requests:
        scheduler.add(request)
    computed = 0
    while step := run_step(scheduler, simulator, {}):
        scheduler.manager.check()
        computed += step.num_tokens
    assert all(r.output_token_ids == solo(r) for r in requests)
    assert computed == num_prompt + 3 + 4 * 29, "each sibling computes only the prompt's last token again"


def test_shared_blocks_are_counted_once() -> None:
    scheduler, simulator = build()
    for request in family(100, 4):
        scheduler.add(request)
    for _ in range(4):
        run_step(scheduler, simulator, {})
    assert scheduler.num_running == 4
    assert scheduler.manager.stats().blocks_used == 6 + 4, "6 shared full blocks, one own block each"


def test_copy_on_write_of_either_side() -> None:
    scheduler, _ = build()
    manager = scheduler.manager
    parent, child = Request("p", [1] * 20, 8), Request("c", [1] * 20, 8)
    assert manager.allocate(parent, 20) == []
    parent.num_computed_tokens = 20
    assert not manager.fork(parent, child, 20), "nothing shows yet that the parent's values are finite"
    manager.settle(parent, 20)
    assert manager.fork(parent, child, 20)
    shared = parent.block_tables[0][1]
    assert child.block_tables == parent.block_tables
    [(source, target)] = manager.allocate(parent, 1)
    assert (source, target) == (shared, parent.block_tables[0][1])
    assert manager.allocate(child, 1) == [], "the child is alone with the old block"
    assert child.block_tables[0][1] == shared
    manager.check()
    manager.free(parent)
    manager.free(child)
    manager.check()


def test_sibling_gone_means_computing_alone() -> None:
    scheduler, simulator = build(batched=16)
    first, second = family(40, 2)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler, simulator, {})
    assert scheduler.num_waiting == 1, "waits for the sibling's prompt"
    scheduler.abort(["c0"])
    drain(scheduler, simulator)
    assert second.output_token_ids == solo(second)


def test_unknown_or_different_sibling_is_no_sibling() -> None:
    scheduler, simulator = build()
    requests = [
        Request("a", [1, 2, 3], 5, fork_of="b"),
        Request("b", [2, 2, 3], 5, fork_of="a"),
        Request("c", [1, 2, 3], 5, fork_of="c"),
    ]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, simulator)
    assert all(r.output_token_ids == solo(r) for r in requests)


def test_forks_in_a_tight_pool() -> None:
    scheduler, simulator = build(num_usable=7)
    requests = family(40, 5, max_tokens=50)
    for request in requests:
        scheduler.add(request)
    streams = drain(scheduler, simulator)
    assert all(streams[r.request_id] == solo(r) for r in requests)
    assert scheduler.counters.preemptions > 0
