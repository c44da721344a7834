"""A request that meets non-finite values ends alone, and nobody meets its values again."""

from paged_simulator import build, drain, run_step, solo
from qengine.core.request import FinishReason, Request
from qengine.core.step import KVGroupSpec


def test_only_that_request_ends() -> None:
    scheduler, simulator = build()
    bad, good = Request("bad", list(range(40)), 30), Request("good", list(range(40)), 30)
    simulator.poison["bad"] = 50
    scheduler.add(bad)
    scheduler.add(good)
    streams = drain(scheduler, simulator)
    assert bad.finish_reason is FinishReason.ERROR and bad.error == "logits are not finite"
    assert streams["bad"] == solo(bad)[:11], "everything before the bad value was fine"
    assert streams["good"] == solo(good)
    assert scheduler.counters.nonfinite_requests == 1


def test_its_blocks_leave_the_cache_and_are_zeroed_once() -> None:
    scheduler, simulator = build(num_usable=8)
    bad = Request("bad", list(range(40)), 30)
    simulator.poison["bad"] = 50
    scheduler.add(bad)
    held: set[int] = set()
    while not bad.finished:
        held |= {b for table in bad.block_tables for b in table}
        run_step(scheduler, simulator, {})
    assert len(held) == 4 and scheduler.manager.stats().blocks_cached == 0
    again = Request("again", list(range(40)), 30)
    scheduler.add(again)
    zeroed: list[int] = []
    while step := run_step(scheduler, simulator, {}):
        zeroed += step.zero_blocks
    assert again.num_cached_tokens == 0
    assert set(zeroed) <= held and len(zeroed) == len(set(zeroed)) > 0
    assert again.output_token_ids == solo(again)


def test_a_poisoned_prompt_never_enters_the_cache() -> None:
    scheduler, simulator = build(batched=16, num_usable=12)
    simulator.poison["bad"] = 5
    bad = Request("bad", list(range(100)), 5)
    scheduler.add(bad)
    for _ in range(3):
        run_step(scheduler, simulator, {})
    probe = Request("probe", list(range(100)), 5)
    assert scheduler.manager.lookup(probe).num_tokens == 0, "computed, but nothing shows that it is finite"
    scheduler.manager.free(probe)
    scheduler.abort(["bad"])
    scheduler.add(probe)
    step = scheduler.schedule()
    assert step is not None and step.zero_blocks, "aborted before its values were known: zeroed all the same"
    scheduler.update(step, simulator.run(step))
    drain(scheduler, simulator)
    assert probe.output_token_ids == solo(probe)


def test_blocks_that_left_the_window_unverified_are_zeroed() -> None:
    scheduler, simulator = build(batched=16, num_usable=16, groups=[KVGroupSpec(20, [0])], block_size=8)
    simulator.poison["bad"] = 5
    scheduler.add(Request("bad", list(range(100)), 5))
    zeroed: list[int] = []
    while step := run_step(scheduler, simulator, {}):
        zeroed += step.zero_blocks
    assert zeroed
    fine = Request("fine", list(range(100)), 5)
    scheduler.add(fine)
    drain(scheduler, simulator)
    assert fine.output_token_ids == solo(fine)


def test_sharers_of_a_tainted_prefix_keep_it_until_they_end() -> None:
    scheduler, simulator = build()
    scheduler.add(Request("first", list(range(48)), 1))
    drain(scheduler, simulator)
    good, bad = Request("good", list(range(48)), 20), Request("bad", list(range(48)), 20)
    simulator.poison["bad"] = 55
    scheduler.add(good)
    scheduler.add(bad)
    drain(scheduler, simulator)
    assert good.output_token_ids == solo(good)
    probe = Request("probe", list(range(48)), 1)
    assert scheduler.manager.lookup(probe).num_tokens == 0, "whatever a failed request read is not trusted either"
    scheduler.manager.free(probe)
