"""Thousands of random operations; the books are checked after each, and every value that is read."""

import random

import pytest

from paged_simulator import build, drain, run_step, solo
from qengine.core.pages import KVCacheManager
from qengine.core.pool import IntegrityError
from qengine.core.request import FinishReason, Request
from qengine.core.step import KVGroupSpec
from qengine.errors import CapacityError

GROUPS = {
    "full": [KVGroupSpec(None, [0])],
    "sliding": [KVGroupSpec(11, [0])],
    "mixed": [KVGroupSpec(None, [0]), KVGroupSpec(11, [1]), KVGroupSpec(6, [2])],
}


def make_prompt(rng: random.Random) -> list[int]:
    """Prompts that share prefixes often."""
    return [rng.choice((1, 2))] * rng.randint(1, 20) + [rng.randrange(3) for _ in range(rng.randint(0, 12))]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_manager(groups: list[KVGroupSpec], seed: int) -> None:
    rng = random.Random(seed)
    manager = KVCacheManager(1 + 13 * len(groups), 4, groups)
    live: list[Request] = []
    seen: set[str] = set()
    for serial in range(1500):
        action = rng.choice(("start", "grow", "grow", "grow", "fork", "settle", "free", "taint"))
        request = rng.choice(live) if live else None
        if action == "start" or request is None:
            request = Request(f"r{serial}", make_prompt(rng), 99, cache_salt=rng.choice((None, "s")))
            hit = manager.lookup(request, allow_copy=rng.random() < 0.5)
            assert hit.num_tokens < request.num_tokens
            if hit.num_tokens:
                seen.add("hit")
            manager.attach(request, hit)
            live.append(request)
        elif action == "grow":
            todo = request.num_tokens - request.num_computed_tokens
            n = manager.fit(request, rng.randint(1, max(1, todo)))
            if n == 0:
                with pytest.raises(CapacityError):
                    manager.allocate(request, 1)
                seen.add("full")
            elif todo:
                n = min(n, todo)
                seen.update("copy" for _ in manager.allocate(request, n))
                manager.check()
                request.num_computed_tokens += n
            else:
                request.output_token_ids.append(rng.randrange(3))
        elif action == "fork":
            child = Request(f"r{serial}", list(request.token_ids), 99, cache_salt=request.cache_salt)
            if manager.fork(request, child, max(0, request.num_computed_tokens - 1)):
                live.append(child)
                seen.add("fork")
        elif action == "settle":
            manager.settle(request, request.num_computed_tokens)
        else:
            if action == "taint":
                manager.taint(request)
                seen.add("taint")
            manager.free(request)
            live.remove(request)
        manager.check()
        stats = manager.stats()
        assert stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks_total
    for request in live:
        manager.free(request)
    manager.check()
    assert manager.stats().blocks_used == 0
    assert seen == {"hit", "full", "copy", "fork", "taint"}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(2))
def test_scheduler(groups: list[KVGroupSpec], policy: str, seed: int) -> None:
    rng = random.Random(seed)
    scheduler, simulator = build(48, 4, groups, batched=24, seqs=6, policy=policy)
    requests: list[Request] = []
    streams: dict[str, list[int]] = {}
    for serial in range(600):
        if rng.random() < 0.2:
            prompt, salt = make_prompt(rng), rng.choice((None, "s"))
            n = rng.choice((1, 1, 3))
            poison = rng.randrange(len(prompt) + 10) if rng.random() < 0.05 else None
            for i in range(n):
                request = Request(
                    f"r{serial}.{i}",
                    prompt,
                    rng.randint(1, 30),
                    arrival=float(serial),
                    priority=rng.randrange(3),
                    cache_salt=salt,
                    prompt_logprobs=rng.random() < 0.1,
                    fork_of=f"r{serial}.0" if i else None,
                )
                if poison is not None:
                    simulator.poison[request.request_id] = poison
                requests.append(request)
                scheduler.add(request)
        if rng.random() < 0.05 and requests:
            scheduler.abort([rng.choice(requests).request_id])
        run_step(scheduler, simulator, streams)
        scheduler.manager.check()
    for request_id, ids in drain(scheduler, simulator).items():
        streams.setdefault(request_id, []).extend(ids)
    for request in requests:
        ids = streams.get(request.request_id, [])
        assert ids == request.output_token_ids == solo(request)[: len(ids)]
        if request.finish_reason is FinishReason.LENGTH:
            assert len(ids) == request.max_tokens
        assert (request.finish_reason is FinishReason.ERROR) <= (request.request_id in simulator.poison)
    assert {r.finish_reason for r in requests} == {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    assert scheduler.counters.prefix_hits > 0
    assert scheduler.manager.stats().blocks_used == 0


def test_check_shows_both_sides() -> None:
    manager = KVCacheManager(6, 4, GROUPS["full"])
    request = Request("r", [1] * 8, 1)
    manager.allocate(request, 8)
    manager.pool.share(request.block_tables[0][0])
    with pytest.raises(IntegrityError, match=r"pool \[\(1, 2\)\], block tables \[\(1, 1\)\]"):
        manager.check()
    manager.pool.release(request.block_tables[0][0], keep=False)
    manager.pool._free.pop()
    with pytest.raises(IntegrityError, match=r"free 2 \+ cached 0 \+ in use 2 = 4 blocks, but the pool has 5"):
        manager.check()
    block = manager.pool._free[-1]
    manager.pool._free.append(block)
    with pytest.raises(IntegrityError, match=rf"= 5 blocks.* nowhere: \[3\], in two places: \[{block}\]"):
        manager.check()
