"""Preemption keeps the story: all finish, with the ids of solo runs, and no token is streamed twice."""

import pytest

from paged_simulator import PagedSimulator, add_all, build, drain, solo
from qengine.core.request import FinishReason, Request, Status
from qengine.core.step import KVGroupSpec, SampledToken, Step
from qengine.errors import CapacityError


def four(max_tokens: int = 60) -> list[Request]:
    return [Request(f"r{i}", [i] * 20, max_tokens, arrival=float(i)) for i in range(4)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("batched", [8, 64])
def test_four_requests_in_six_blocks(caching: bool, batched: int) -> None:
    scheduler, simulator = build(num_usable=6, batched=batched, caching=caching)
    requests = add_all(scheduler, four())
    streams = drain(scheduler, simulator)
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert streams[request.request_id] == request.output_token_ids == solo(request)
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.generation_tokens == 240
    assert scheduler.manager.stats().blocks_used == 0


class Forgetful(PagedSimulator):
    """Samples again what a preempted request had already sampled before: the control."""

    def run(self, step: Step) -> list[SampledToken]:
        for s in step.sequences:
            if s.request.num_preemptions and s.start == 0 and s.request.output_token_ids:
                s.request.output_token_ids.pop()
                s.num_new_tokens -= 1
                s.request.num_computed_tokens -= 1
        return super().run(step)


def test_control_a_lost_token_is_seen() -> None:
    scheduler, simulator = build(num_usable=6, caching=False)
    requests = add_all(scheduler, four())
    streams = drain(scheduler, Forgetful(simulator.manager))
    assert any(streams[r.request_id] != solo(r) for r in requests)


def test_the_newest_gives_way_and_the_oldest_never() -> None:
    scheduler, simulator = build(num_usable=6)
    requests = add_all(scheduler, four())
    drain(scheduler, simulator)
    assert requests[0].num_preemptions == 0
    assert sum(r.num_preemptions for r in requests) == scheduler.counters.preemptions


def test_preempted_request_comes_back_before_new_ones() -> None:
    scheduler, simulator = build(num_usable=6)
    first, second = add_all(scheduler, four()[:2])
    late = Request("late", [9] * 4, 4, arrival=-1.0)
    resumed_first: list[bool] = []

    def watch() -> None:
        if second.status is Status.PREEMPTED and not late.sequence_number:
            scheduler.add(late)
        if late.status is Status.RUNNING and not resumed_first:
            resumed_first.append(second.status is not Status.PREEMPTED)

    drain(scheduler, simulator, watch)
    assert resumed_first == [True]
    assert second.num_preemptions > 0 == first.num_preemptions


def test_sliding_and_full_groups_survive_preemption() -> None:
    groups = [KVGroupSpec(None, [0]), KVGroupSpec(24, [1]), KVGroupSpec(24, [2])]
    scheduler, simulator = build(num_usable=28, block_size=8, groups=groups, batched=32)
    requests = add_all(scheduler, four())
    streams = drain(scheduler, simulator)
    assert all(streams[r.request_id] == solo(r) for r in requests)
    assert scheduler.counters.preemptions > 0


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler, _ = build(num_usable=4)
    with pytest.raises(CapacityError) as error:
        scheduler.add(four()[0])
    for part in ("64 tokens", "4 blocks", "80 tokens", "5 blocks", "20 prompt + 60 new"):
        assert part in str(error.value)
    scheduler.add(Request("fits", [1] * 20, 44))
    with pytest.raises(CapacityError, match="have: 4096 tokens"):
        scheduler.add(Request("long", [1] * 4000, 97))
    assert scheduler.num_waiting == 1
