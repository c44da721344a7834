"""K/V that goes to host memory and comes back: the same ids, balanced books on both sides, nothing read too early."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from paged_simulator import FULL, SWAP, LateSimulator, PagedSimulator, add_all, build, drain, drain_late, solo
from qengine.core.host_tier import HostTier
from qengine.core.pages import KVCacheManager
from qengine.core.pool import IntegrityError
from qengine.core.request import FinishReason, Request
from qengine.core.scheduler import Scheduler
from qengine.core.step import KVGroupSpec, Step
from qengine.core.swap_policy import SwapCosts, SwapPolicy

GROUPS = [FULL, [KVGroupSpec(11, [0])], [KVGroupSpec(None, [0]), KVGroupSpec(11, [1]), KVGroupSpec(6, [2])]]
RECOMPUTE = SwapPolicy("recompute")


def tier(scheduler: Scheduler) -> HostTier:
    host = scheduler.manager.host
    assert host is not None
    return host


def crowd(n: int = 4, tokens: int = 60) -> list[Request]:
    return [Request(f"r{i}", [i] * 20, tokens, arrival=float(i)) for i in range(n)]


@pytest.mark.parametrize("late", [False, True], ids=["settled", "late"])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_requests_go_on_where_they_stood(caching: bool, late: bool) -> None:
    scheduler, simulator = build(num_usable=6, caching=caching, host=40)
    requests = add_all(scheduler, crowd())
    resumed: list[int] = []
    if late:
        streams = drain_late(scheduler, LateSimulator(scheduler.manager))
    else:
        streams = drain(scheduler, Watching(simulator.manager, resumed))
    assert all(streams[r.request_id] == solo(r) for r in requests)
    counters, moved = scheduler.counters, tier(scheduler)
    assert counters.preemptions == counters.preemptions_swapped > 0
    assert counters.recomputed_tokens == 0
    assert moved.moved_out > 0 < moved.moved_in
    assert late or set(resumed) == {1}, "a resumed request decodes at once"
    assert tier(scheduler).num_parked == 0 == tier(scheduler).pool.num_used


class Watching(PagedSimulator):
    """Notes how many tokens are computed in the step in which a preempted request comes back."""

    def __init__(self, manager: KVCacheManager, resumed: list[int]) -> None:
        super().__init__(manager)
        self.resumed = resumed
        self.seen: dict[str, int] = {}

    def run(self, step: Step) -> list[Any]:
        for s in step.sequences:
            if s.request.num_preemptions > self.seen.get(s.request.request_id, 0):
                self.seen[s.request.request_id] = s.request.num_preemptions
                self.resumed.append(s.num_new_tokens)
        return super().run(step)


def test_recompute_computes_again_and_a_full_host_too() -> None:
    for options in ({"host": 40, "swap": RECOMPUTE, "caching": False}, {"host": 1, "caching": False}):
        scheduler, simulator = build(num_usable=6, **options)  # type: ignore[arg-type]
        requests = add_all(scheduler, crowd())
        streams = drain(scheduler, simulator)
        assert all(streams[r.request_id] == solo(r) for r in requests)
        assert scheduler.counters.preemptions > scheduler.counters.preemptions_swapped == 0
        assert scheduler.counters.recomputed_tokens > 0


def test_an_evicted_prefix_is_found_in_host_memory() -> None:
    scheduler, simulator = build(num_usable=6, host=20)
    first = add_all(scheduler, [Request("first", [7] * 48, 8)])[0]
    drain(scheduler, simulator)
    add_all(scheduler, [Request("other", [8] * 80, 8)])
    drain(scheduler, simulator)
    assert tier(scheduler).moved_out >= 3
    again = add_all(scheduler, [Request("again", [7] * 48, 8)])[0]
    streams = drain(scheduler, simulator)
    assert streams["again"] == solo(again) == first.output_token_ids
    assert again.num_cached_tokens == 47, "all but the last token"
    # A salt makes it another prefix, also in host memory.
    add_all(scheduler, [Request("other2", [9] * 80, 8)])
    drain(scheduler, simulator)
    salted = add_all(scheduler, [Request("salted", [7] * 48, 8, cache_salt="s")])[0]
    assert drain(scheduler, simulator)["salted"] == solo(salted)
    assert salted.num_cached_tokens == 0


def test_a_block_that_is_still_there_is_not_copied() -> None:
    """Preempted for one block: only what others needed meanwhile went to host memory."""
    scheduler, simulator = build(num_usable=12, block_size=4, host=40)
    requests = add_all(scheduler, [Request("old", [1] * 20, 8), Request("new", [2] * 20, 8, arrival=1.0)])
    streams = drain(scheduler, simulator)
    assert all(streams[r.request_id] == solo(r) for r in requests)
    assert scheduler.counters.preemptions_swapped == 1
    assert 0 < tier(scheduler).moved_out <= 3


def test_auto_compares_costs() -> None:
    costs = SwapCosts(move=1.0, start=5.0, token=0.5)
    policy = SwapPolicy("auto", costs)
    assert policy.parks(10, 40) and not policy.parks(10, 30)
    assert policy.keeps(1, 16) and not policy.keeps(1, 2)
    assert SWAP.parks(10, 1) and not RECOMPUTE.parks(1, 10_000) and RECOMPUTE.keeps(9, 1)
    scheduler, simulator = build(num_usable=6, host=40, swap=SwapPolicy("auto", SwapCosts(1.0, 0.0, 1e-6)))
    requests = add_all(scheduler, crowd())
    streams = drain(scheduler, simulator)
    assert all(streams[r.request_id] == solo(r) for r in requests)
    assert tier(scheduler).moved_out == 0, "moving costs more than computing: the host is left alone"
    with pytest.raises(ValueError, match="measured"):
        SwapPolicy("auto")


def test_an_aborted_request_leaves_nothing_behind() -> None:
    scheduler, simulator = build(num_usable=6, host=40, caching=False)
    requests = add_all(scheduler, crowd())
    aborted: list[str] = []

    def watch() -> None:
        for r in requests:
            if tier(scheduler).parked(r.request_id) is not None and not aborted:
                aborted.append(r.request_id)
                scheduler.abort([r.request_id])
                scheduler.manager.check()

    drain(scheduler, simulator, watch)
    assert aborted and tier(scheduler).pool.num_used == 0
    assert tier(scheduler).pool.num_free == tier(scheduler).pool.num_usable


def test_what_a_nonfinite_request_read_is_forgotten_in_both_places() -> None:
    scheduler, simulator = build(num_usable=8, host=40)
    add_all(scheduler, [Request("a", [7] * 48, 2)])
    drain(scheduler, simulator)
    add_all(scheduler, [Request("b", [8] * 120, 2)])
    drain(scheduler, simulator)
    assert len(tier(scheduler).index) == 3
    simulator.poison["bad"] = 50
    bad = add_all(scheduler, [Request("bad", [7] * 48 + [1] * 4, 8)])[0]
    drain(scheduler, simulator)
    assert bad.finish_reason is FinishReason.ERROR and bad.num_cached_tokens == 48
    after = add_all(scheduler, [Request("after", [7] * 48, 2)])[0]
    assert drain(scheduler, simulator)["after"] == solo(after)
    assert after.num_cached_tokens == 0


def test_the_books_of_the_host_are_checked() -> None:
    scheduler, simulator = build(num_usable=6, host=40, caching=False)
    add_all(scheduler, crowd())
    while not tier(scheduler).num_parked:
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, simulator.run(step))
    scheduler.manager.check()
    parked = next(iter(tier(scheduler)._parked.values()))
    kept, parked.tables[0][0] = parked.tables[0][0], 0
    with pytest.raises(IntegrityError, match="host memory: reference counts differ"):
        scheduler.manager.check()
    parked.tables[0][0] = kept
    tier(scheduler).pool._free.pop()
    with pytest.raises(IntegrityError, match=r"host memory: free \d+ \+ cached 0 \+ in use \d+ = 39 blocks"):
        scheduler.manager.check()


class BackFirst(PagedSimulator):
    """The control: copies from the host before those to it."""

    def move(self, step: Step) -> None:
        back, step.swap_in = step.swap_in, []
        for host, block in back:
            self.memory[block] = list(self.host.get(host, []))
        super().move(step)
        for block in step.zero_blocks:
            self.memory[block] = [None] * self.manager.block_size


class Lazy(PagedSimulator):
    """The control: a copy to the host is made once its device block has been written anew."""

    def move(self, step: Step) -> None:
        pending, self.pending = getattr(self, "pending", []), step.swap_out
        step.swap_out = pending
        super().move(step)


@pytest.mark.parametrize("wrong", [BackFirst, Lazy])
def test_controls_copies_in_the_wrong_order_are_seen(wrong: type[PagedSimulator]) -> None:
    def story(kind: type[PagedSimulator]) -> None:
        scheduler, _ = build(num_usable=9, block_size=4, batched=24, host=12)
        prompts = [[1] * 16, [2] * 16, [3] * 16, [1] * 12 + [2] * 4, [2] * 8 + [1] * 8]
        simulator = kind(scheduler.manager)
        for turn in range(3):
            add_all(scheduler, [Request(f"{turn}-{i}", p, 12, arrival=float(i)) for i, p in enumerate(prompts)])
            drain(scheduler, simulator)

    story(PagedSimulator)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        story(wrong)


def random_story(draw: Random) -> dict[str, Any]:
    groups, size = draw.choice(GROUPS), draw.choice([2, 4, 8])
    needed = sum(g.max_blocks(52, size, 24) for g in groups)
    count = draw.randint(4, 24)
    return {
        "options": {
            "groups": groups,
            "block_size": size,
            "num_usable": needed + draw.randint(0, 12),
            "host": draw.choice([1, 3, 8, 30, 200]),
            "swap": draw.choice([SWAP, RECOMPUTE, SwapPolicy("auto", SwapCosts(1.0, 2.0, 0.3))]),
            "caching": draw.random() < 0.5,
            "batched": 24,
            "seqs": 6,
            "policy": draw.choice(["fcfs", "priority"]),
        },
        "requests": [
            (draw.randint(0, 3), draw.randint(1, 24), draw.randint(0, 6), draw.randint(1, 20), draw.randint(0, 2),
             draw.random() < 0.5)
            for _ in range(count)
        ],
        "gaps": [draw.randint(0, 6) for _ in range(count)],
        "late": draw.random() < 0.5,
        "abort": set(draw.sample(range(count), draw.randint(0, 4))),
        "poison": {draw.randrange(count): draw.randint(0, 30) for _ in range(draw.randint(0, 2))},
    }  # fmt: skip


def test_any_story_ends_as_it_does_alone() -> None:
    """Random requests, ends, errors and aborts, settled at once or late, in pools of all sizes."""
    seen: Counter[str] = Counter()
    for number in range(120):
        print(f"story {number}")
        tell(random_story(Random(number)), seen)
    assert all(seen[what] > 5 for what in ("out", "back", "parked", "recomputed", "errors", "aborts")), seen


def tell(story: dict[str, Any], seen: Counter[str]) -> None:
    scheduler, simulator = build(**story["options"])
    if story["late"]:
        simulator = LateSimulator(scheduler.manager)
    made: list[Request] = []
    running: list[tuple[Step, list[Any]]] = []
    streams: dict[str, list[int]] = {}

    def settle(keep: int) -> None:
        while len(running) > keep:
            for p in scheduler.update(*running.pop(0)):
                streams.setdefault(p.request.request_id, []).extend(p.new_token_ids)
        scheduler.manager.check()

    def advance() -> bool:
        step = scheduler.schedule()
        if step is not None:
            running.append((step, simulator.run(step)))
        settle(1 if story["late"] and step is not None else 0)
        return step is not None

    for i, (kind, prefix, tail, tokens, priority, salted) in enumerate(story["requests"]):
        prompt = [kind] * prefix + [j % 3 for j in range(tail)] + [kind]
        request = Request(f"r{i}", prompt, tokens, float(i), priority, cache_salt="s" if salted else None)
        if i in story["poison"] and not story["late"]:
            simulator.poison[request.request_id] = story["poison"][i]
        made += add_all(scheduler, [request])
        for _ in range(story["gaps"][i]):
            advance()
        if i in story["abort"]:
            settle(0)  # what runs reads the blocks that an abort gives back
            scheduler.abort([made[i // 2].request_id])
            scheduler.manager.check()
    while advance() or scheduler.has_work:
        pass
    scheduler.check_idle()
    for request in made:
        ids = streams.get(request.request_id, [])
        assert ids == request.output_token_ids == solo(request)[: len(ids)]
        if request.finish_reason is FinishReason.LENGTH:
            assert len(ids) == request.max_tokens
        seen["errors"] += request.finish_reason is FinishReason.ERROR
        seen["aborts"] += request.finish_reason is FinishReason.ABORT
    stats, host = scheduler.manager.stats(), tier(scheduler)
    assert stats.blocks_used == 0 == host.pool.num_used == host.num_parked
    seen.update(out=host.moved_out, back=host.moved_in)
    seen.update(parked=scheduler.counters.preemptions_swapped, recomputed=scheduler.counters.recomputed_tokens)
