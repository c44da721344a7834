"""Prefix hits: what is shared, what never is."""

import pytest

from paged_simulator import add_all, build, drain, solo
from qengine.core import prefix
from qengine.core.prefix import PrefixNode, same_chain
from qengine.core.request import Request


def ask(name: str, prompt: list[int], **fields: object) -> Request:
    return Request(name, prompt, 8, **fields)  # type: ignore[arg-type]


def test_full_blocks_of_a_prompt_are_shared() -> None:
    scheduler, simulator = build()
    prompt = list(range(40))
    for name, cached in (("a", 0), ("b", 32)):
        request = ask(name, [*prompt, ord(name)])
        scheduler.add(request)
        assert drain(scheduler, simulator)[name] == solo(request)
        assert request.num_cached_tokens == cached
    assert (scheduler.counters.prefix_queries, scheduler.counters.prefix_hits) == (82, 32)


def test_last_token_of_a_cached_prompt_is_recomputed_in_a_copy() -> None:
    scheduler, simulator = build()
    scheduler.add(ask("a", list(range(32))))
    drain(scheduler, simulator)
    request = ask("b", list(range(32)))
    scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    [sequence] = step.sequences
    assert (sequence.start, sequence.num_new_tokens, sequence.samples) == (31, 1, True)
    [(source, target)] = step.copy_blocks
    assert request.block_tables[0][1] == target != source
    scheduler.update(step, simulator.run(step))
    drain(scheduler, simulator)
    assert request.output_token_ids == solo(request)


def test_a_pool_without_room_for_the_copy_recomputes_the_last_block() -> None:
    scheduler, simulator = build(num_usable=8)
    scheduler.add(Request("a", list(range(32)), 1))
    drain(scheduler, simulator)
    hog, request = Request("hog", [5] * 70, 8), Request("b", list(range(32)), 1)
    scheduler.add(hog)
    scheduler.add(request)
    drain(scheduler, simulator)
    assert request.num_cached_tokens == 16
    assert request.output_token_ids == solo(request)


def test_generated_blocks_are_cached_too() -> None:
    scheduler, simulator = build()
    first = Request("a", list(range(20)), 40)
    scheduler.add(first)
    drain(scheduler, simulator)
    turn = ask("b", [*first.token_ids, 3, 4])
    scheduler.add(turn)
    drain(scheduler, simulator)
    assert turn.num_cached_tokens == 48, "59 of the first turn's 60 tokens were computed"
    assert turn.output_token_ids == solo(turn)


def test_salt_and_identity_separate() -> None:
    scheduler, simulator = build()
    prompt = list(range(48))
    requests = [ask("a", prompt), ask("b", prompt, cache_salt="x"), ask("c", prompt, cache_salt="x")]
    for request in requests:
        scheduler.add(request)
        drain(scheduler, simulator)
    assert [r.num_cached_tokens for r in requests] == [0, 0, 47]
    scheduler.manager.identity = "adapter 1"
    other = ask("d", prompt)
    scheduler.add(other)
    assert scheduler.manager.lookup(other).num_tokens == 0
    scheduler.abort(["d"])


def test_prompt_logprobs_look_nothing_up() -> None:
    scheduler, simulator = build()
    scheduler.add(ask("a", list(range(48))))
    drain(scheduler, simulator)
    request = ask("b", list(range(48)), prompt_logprobs=True)
    scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None and step.sequences[0].start == 0
    assert scheduler.counters.prefix_queries == 48


def test_without_prefix_caching_nothing_is_kept() -> None:
    scheduler, simulator = build(caching=False)
    for name in ("a", "b"):
        scheduler.add(ask(name, list(range(48))))
        drain(scheduler, simulator)
    assert scheduler.manager.stats().blocks_cached == 0
    assert scheduler.counters.prefix_queries == 0


PROMPTS = {
    "other first block": [9] * 16 + list(range(16, 48)),
    "repeated block": list(range(16)) * 3,
    "shifted": list(range(16, 48)) + list(range(16)),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_equal_hashes_give_no_false_hit(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "hash_block", lambda parent, content: 7)
    scheduler, simulator = build()
    for name, ids in (("a", list(range(48))), ("b", prompt), ("c", list(range(48)))):
        request = ask(name, ids)
        scheduler.add(request)
        drain(scheduler, simulator)
        assert request.output_token_ids == solo(request)


def test_control_without_comparing_ids_equal_hashes_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "hash_block", lambda parent, content: 7)
    monkeypatch.setattr(prefix, "same_chain", lambda a, b: True)
    scheduler, simulator = build()
    add_all(scheduler, [ask("a", list(range(48)))])
    drain(scheduler, simulator)
    scheduler.add(ask("b", [9] * 48))
    with pytest.raises(AssertionError, match="position 0"):
        drain(scheduler, simulator)


def test_chains_differ_by_any_ancestor() -> None:
    def chain(*blocks: tuple[int, ...], salt: str | None = None) -> PrefixNode:
        node = PrefixNode(None, ("", salt))
        for block in blocks:
            node = PrefixNode(node, block)
        return node

    assert same_chain(chain((1, 2), (3, 4)), chain((1, 2), (3, 4)))
    assert not same_chain(chain((1, 9), (3, 4)), chain((1, 2), (3, 4)))
    assert not same_chain(chain((3, 4)), chain((1, 2), (3, 4)))
    assert not same_chain(chain((1, 2), salt="s"), chain((1, 2)))


def test_the_least_recently_used_go_first_and_heads_last() -> None:
    scheduler, simulator = build(num_usable=8)
    for name in ("a", "b"):
        scheduler.add(Request(name, [ord(name)] * 48, 1))
        drain(scheduler, simulator)
    scheduler.add(Request("c", [1] * 60, 1))
    drain(scheduler, simulator)
    hits = {}
    for name in ("a", "b"):
        probe = Request("probe " + name, [ord(name)] * 48 + [0], 1)
        scheduler.add(probe)
        hits[name] = scheduler.manager.lookup(probe).num_tokens
        scheduler.abort([probe.request_id])
    assert hits == {"a": 16, "b": 48}
