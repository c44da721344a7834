"""Steps that are scheduled before the result of the last one is known: the same ids, no surplus token shown."""

import random

import pytest

from paged_simulator import FULL, LateSimulator, PagedSimulator, add_all, build, drain_late, solo
from qengine.core.request import FinishReason, Request, Status
from qengine.core.scheduler import Scheduler
from qengine.core.step import KVGroupSpec

MIXED = [KVGroupSpec(None, [0]), KVGroupSpec(24, [1])]


def late(**options: object) -> tuple[Scheduler, LateSimulator]:
    scheduler, simulator = build(**options)  # type: ignore[arg-type]
    return scheduler, LateSimulator(simulator.manager)


@pytest.mark.parametrize("groups", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize(("usable", "batched"), [(14, 8), (14, 64), (200, 64)])
def test_ids_are_those_of_solo_runs(usable: int, batched: int, groups: list[KVGroupSpec]) -> None:
    scheduler, simulator = late(num_usable=usable, block_size=8, batched=batched, groups=groups)
    requests = add_all(scheduler, [Request(f"r{i}", [i] * 20, 30 + i, arrival=float(i)) for i in range(4)])
    streams = drain_late(scheduler, simulator)
    for request in requests:
        assert streams[request.request_id] == request.output_token_ids == solo(request)
        assert request.num_pending == 0
    # An end by length is known before it comes: nothing beyond it was sampled.
    assert {k: len(v) for k, v in simulator.sampled.items()} == {f"r{i}": 30 + i for i in range(4)}
    assert (scheduler.counters.preemptions > 0) == (usable == 14)
    assert scheduler.manager.stats().blocks_used == 0


def test_a_simulator_that_knows_only_what_the_host_knows_fails() -> None:
    """The control: ids that are one step old."""
    scheduler, simulator = build()
    scheduler.add(Request("r", [1, 2, 3], 8))
    with pytest.raises((IndexError, AssertionError)):
        drain_late(scheduler, PagedSimulator(simulator.manager))


@pytest.mark.parametrize("caching", [True, False])
def test_a_surplus_token_is_dropped_and_its_slot_freed(caching: bool) -> None:
    third = solo(Request("x", [5, 1], 20))[2]
    scheduler, simulator = late(caching=caching)
    request, other = Request("x", [5, 1], 20, eos_token_ids=frozenset({third})), Request("y", [7] * 30, 20)
    add_all(scheduler, [request, other])
    streams = drain_late(scheduler, simulator)
    assert streams["x"] == solo(Request("x", [5, 1], 20))[:3] and request.finish_reason is FinishReason.STOP
    assert len(simulator.sampled["x"]) == 4, "one token more was computed"
    assert streams["y"] == solo(other)
    assert scheduler.counters.generation_tokens == 23


def test_one_that_ends_while_it_waits_preempted() -> None:
    """Preempted for an older one by the very step that is scheduled while its last token is computed."""
    ends = 0
    for prompt in range(12, 40):
        scheduler, simulator = late(num_usable=6, block_size=8, batched=64, caching=False)
        last = solo(Request("b", [prompt] * 7, 40))
        older = Request("a", [1] * prompt, 48 - prompt, arrival=0.0)
        newer = Request("b", [prompt] * 7, 40, arrival=1.0, eos_token_ids=frozenset(last))
        newer.min_tokens = 3
        add_all(scheduler, [older, newer])
        before: list[Status] = []
        streams = drain_late(scheduler, simulator, lambda: before.append(newer.status))  # noqa: B023
        assert streams["a"] == solo(older) and streams["b"] == last[:3]
        ends += newer.num_preemptions > 0 and Status.PREEMPTED not in before
    assert ends, "no run met the case"


def test_a_row_that_is_not_finite_ends_alone_one_step_late() -> None:
    scheduler, simulator = late(num_usable=20, block_size=4)
    bad, good = Request("bad", [3] * 6, 20), Request("good", [4] * 9, 20)
    simulator.poison["bad"] = 8
    add_all(scheduler, [bad, good])
    streams = drain_late(scheduler, simulator)
    assert bad.finish_reason is FinishReason.ERROR and len(streams["bad"]) == 3
    assert streams["good"] == solo(good)
    assert scheduler.counters.nonfinite_requests == 1


def test_siblings_wait_until_the_prompt_is_known_to_be_finite() -> None:
    scheduler, simulator = late(num_usable=64, block_size=8, caching=False)
    first = Request("0", [2] * 60, 8)
    rest = [Request(str(i), [2] * 60, 8, fork_of="0") for i in (1, 2)]
    add_all(scheduler, [first, *rest])
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, scheduler.manager.stats().blocks_used)

    streams = drain_late(scheduler, simulator, watch)
    assert all(streams[str(i)] == solo(first) for i in range(3))
    assert most <= 7 + 3 * 2, "the prompt's full blocks are shared"


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_ends_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice((FULL, MIXED))
    scheduler, simulator = late(num_usable=24, block_size=4, batched=rng.choice((5, 40)), seqs=5, groups=groups)
    alive: dict[str, Request] = {}
    serial = 0

    def act() -> None:
        nonlocal serial
        if serial < 60 and rng.random() < 0.4:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            stops = frozenset(rng.sample(range(50), 3))
            request = Request(f"r{serial}", ids, rng.randint(1, 20), arrival=serial, eos_token_ids=stops)
            serial += 1
            scheduler.add(request)
            alive[request.request_id] = request
        if alive and rng.random() < 0.04:
            scheduler.abort([rng.choice(list(alive))])

    act()
    while not alive:
        act()
    streams: dict[str, list[int]] = {}
    for _ in range(60):  # the scheduler runs dry now and then
        act()
        for name, ids in drain_late(scheduler, simulator, act).items():
            streams.setdefault(name, []).extend(ids)
    for name, request in alive.items():
        want = solo(request)
        end = next((i + 1 for i, t in enumerate(want) if t in request.eos_token_ids), len(want))
        found = streams.get(name, [])
        assert found == want[: len(found)] == request.output_token_ids
        assert request.finish_reason is FinishReason.ABORT or len(found) == end
    assert len(alive) > 40 and scheduler.manager.stats().blocks_used == 0
