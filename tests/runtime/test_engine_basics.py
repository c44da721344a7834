"""The engine on toy models: stops, prefix cache, n, chunked prefill, aborts, non-finite rows, waste."""

import random
from pathlib import Path

import pytest
import torch

from toy_engine import Run, request, run, toy_engine
from toy_models import make_succ, make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def succ(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_succ(tmp_path_factory.mktemp("succ"))


def test_eos_and_stop_ids_end_a_request(succ: Path) -> None:
    engine = toy_engine(succ)
    out = run(engine, [
        request("eos", [10], max_tokens=50, eos_token_ids=[15]),
        request("ignored", [10], max_tokens=8, eos_token_ids=[15], ignore_eos=True),
        request("stop", [10], max_tokens=50, stop_token_ids=[13]),
        request("late", [10], max_tokens=50, stop_token_ids=[13], min_tokens=5, eos_token_ids=[20]),
    ])
    assert out.ids["eos"] == [11, 12, 13, 14, 15] and out.last["eos"].finish_reason == "stop"
    assert out.ids["ignored"] == list(range(11, 19)) and out.last["ignored"].finish_reason == "length"
    assert out.ids["stop"] == [11, 12, 13] and out.last["stop"].stop_reason == 13
    assert len(out.ids["late"]) >= 5


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_chunked_prefill_gives_the_same_text(tiny: Path, budget: int) -> None:
    prompts = [list(range(5, 5 + n)) for n in (3, 40, 17, 90)]
    whole = run(toy_engine(tiny, max_num_batched_tokens=512), [request(str(i), p) for i, p in enumerate(prompts)])
    parts = run(
        toy_engine(tiny, max_num_batched_tokens=budget), [request(str(i), p) for i, p in enumerate(prompts)]
    )
    assert parts.ids == whole.ids
    assert parts.steps > whole.steps


@pytest.mark.parametrize("kv", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("length", [15, 16, 17, 48, 50])
def test_a_prefix_hit_gives_the_cold_text(tiny: Path, kv: str, length: int) -> None:
    prompt = [(7 * i) % 250 for i in range(length)]
    engine = toy_engine(tiny, kv_cache_dtype=kv)
    cold = run(engine, [request("a", prompt)])
    before = engine.stats().prefix_cache_hits
    warm = run(engine, [request("b", prompt)])
    other = run(engine, [request("c", prompt, cache_salt="x")])
    assert warm.ids["b"] == cold.ids["a"] == other.ids["c"]
    hit = engine.stats().prefix_cache_hits - before
    assert hit == min(length // 16 * 16, length - 1)
    off = toy_engine(tiny, kv_cache_dtype=kv, enable_prefix_caching=False)
    assert run(off, [request("a", prompt)]).ids["a"] == cold.ids["a"]
    assert off.stats().prefix_cache_hits == 0


def test_n_choices_share_the_prompts_blocks(tiny: Path) -> None:
    prompt = [(3 * i) % 250 for i in range(70)]
    engine = toy_engine(tiny, enable_prefix_caching=False)
    family = [request("0", prompt, temperature=1.0, seed=1)] + [
        request(str(i), prompt, temperature=1.0, seed=i + 1, fork_of="0") for i in (1, 2, 3)
    ]
    for new in family:
        engine.add(new)
    r, most, computed = Run(engine), 0, []
    launch = engine.runner.launch
    engine.runner.launch = lambda step: (computed.append(step.num_tokens), launch(step))[1]
    while engine.has_work:
        r.step()
        most = max(most, engine.stats().kv_blocks_used)
    engine.runner.launch = launch
    assert sum(computed) == 70 + 3 + 4 * 15  # one prompt, its last token for each sibling, fifteen decodes each
    solo = {str(i): run(engine, [request("s", prompt, temperature=1.0, seed=i + 1)]).ids["s"] for i in range(4)}
    assert {k: r.ids[k] for k in solo} == solo
    assert most < 4 * (70 // 16)


def test_abort_in_any_state_frees_everything(tiny: Path) -> None:
    engine = toy_engine(tiny, max_num_seqs=2)
    for i in range(5):
        engine.add(request(f"r{i}", range(30 + i), max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.abort(["r0", "r4", "nobody", "r0"])
    r = Run(engine)
    while engine.has_work:
        r.step()
    assert set(r.last) == {"r1", "r2", "r3"}
    engine.step()
    assert engine.stats().kv_blocks_used == 0


def test_nonfinite_logits_end_only_their_own_request(tiny: Path) -> None:
    engine = toy_engine(tiny)
    poison = 250
    with torch.inference_mode():
        table = next(t for leaf in engine.runner.model.leaves for n, t in leaf.buffers().items()
                     if tuple(t.shape) == (320, 256) and "embed" in leaf.name)
        table[poison] = float("nan")
    clean = run(engine, [request("alone", range(40))]).ids["alone"]
    out = run(engine, [
        request("bad", [*range(20), poison, *range(20)]),
        request("good", range(40)),
    ])
    assert out.last["bad"].finish_reason == "error" and "not finite" in (out.last["bad"].error or "")
    assert out.ids["bad"] == []
    assert out.ids["good"] == clean
    assert engine.stats().nonfinite_requests == 1
    # The whole pool is used once more: no block may still hold the NaN.
    never = {poison: -100.0}
    many = run(engine, [request(f"m{i}", [i, *range(60)], max_tokens=30, logit_bias=never) for i in range(40)])
    assert all(o.finish_reason == "length" for o in many.last.values())


def test_greedy_text_alone_and_in_a_crowd(tiny: Path) -> None:
    gen = random.Random(3)
    prompts = [[gen.randrange(250) for _ in range(gen.randrange(3, 60))] for _ in range(16)]
    crowd = run(toy_engine(tiny), [request(str(i), p, max_tokens=24) for i, p in enumerate(prompts)])
    alone = toy_engine(tiny)
    for i, p in enumerate(prompts):
        assert run(alone, [request("s", p, max_tokens=24)]).ids["s"] == crowd.ids[str(i)]


def test_wasted_slots_stay_under_four_percent(tiny: Path) -> None:
    gen = random.Random(4)
    engine = toy_engine(tiny, kv_cache_memory_bytes=64 << 20)
    for i in range(64):
        prompt = [gen.randrange(250) for _ in range(gen.randrange(64, 300))]
        engine.add(request(str(i), prompt, max_tokens=gen.randrange(16, 257), ignore_eos=True))
    allocated = wasted = 0
    while engine.has_work:
        s = engine.step().stats
        allocated += s.kv_slots_allocated
        wasted += s.kv_slots_wasted
    assert 0 < wasted / allocated < 0.04


def test_prompt_logprobs_are_those_of_the_prompt(tiny: Path) -> None:
    prompt = [(11 * i) % 250 for i in range(40)]
    small = run(toy_engine(tiny, max_num_batched_tokens=9), [request("a", prompt, prompt_logprobs=2, logprobs=3)])
    large = run(toy_engine(tiny), [request("a", prompt, prompt_logprobs=2, logprobs=3)])
    for r in (small, large):
        given = [o.prompt_logprobs for o in r.outputs if o.prompt_logprobs]
        assert len(given) == 1 and len(given[0]) == len(prompt) and given[0][0] is None
        assert [p.token_id for p in given[0][1:]] == prompt[1:]
    a, b = (next(o.prompt_logprobs for o in r.outputs if o.prompt_logprobs) for r in (small, large))
    assert max(abs(x.logprob - y.logprob) for x, y in zip(a[1:], b[1:], strict=True)) < 1e-4
    tokens = [lp for o in large.outputs for lp in (o.logprobs or [])]
    assert [t.token_id for t in tokens] == large.ids["a"]
    assert all(t.rank == 1 and t.logprob <= 0 for t in tokens)
