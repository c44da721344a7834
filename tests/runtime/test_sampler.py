"""Sampled tokens against a slow reference, token by token, for every option and their mixtures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sampling_reference as ref
from qengine.core.request import Request
from qengine.runtime.random_streams import stream_of
from qengine.runtime.sampler import BLOCK, FEW, Sampler, inverse_cdf
from sampling_reference import make_request, uniform

VOCAB = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k_all": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "top_p_0": {"top_p": 0.0},
    "min_p": {"min_p": 0.1},
    "top_k_top_p": {"top_k": 6, "top_p": 0.6, "temperature": 1.7},
    "all_filters": {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.1},
    "penalties": {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.7, "temperature": 0.9},
    "bias": {"logit_bias": {3: 8.0, 7: -100.0}},
    "bad_words": {"bad_words_token_ids": [[4], [5, 6], [8, 9, 10], [9, 9]]},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": [11], "eos_token_ids": [2, 3]},
    "min_tokens_ignore_eos": {"min_tokens": 4, "stop_token_ids": [11], "eos_token_ids": [2, 3], "ignore_eos": True},
    "everything": {
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 2.0},
        "bad_words_token_ids": [[0], [8, 9]],
        "min_tokens": 3,
        "eos_token_ids": [5],
    },
}


def rows_of(option: str, count: int) -> list[Request]:
    rng = random.Random(option)
    outputs = [[], [8, 9], [9], [5, 8, 9, 9, 12], [rng.randrange(VOCAB) for _ in range(9)]]
    return [
        make_request(f"{option}-{i}", [rng.randrange(VOCAB) for _ in range(6)], outputs[i % 5], **OPTIONS[option])
        for i in range(count)
    ]


def logits_for(count: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def mismatches(
    logits: torch.Tensor, requests: list[Request], tokens: list[int], distribution: Callable[..., list[float]]
) -> int:
    """Rows whose token differs from the reference, where the number drawn is not right at a step."""
    wrong = 0
    for row, r, token in zip(logits.tolist(), requests, tokens, strict=True):
        u = uniform(stream_of(r, 0), len(r.output_token_ids))
        expected, distance = ref.token_at(distribution(row, r), u)
        wrong += token != expected and distance > 1e-5
    return wrong


def sample(logits: torch.Tensor, requests: list[Request], seed: int = 0) -> list[int]:
    out = Sampler(logits.shape[1], torch.device("cpu"), seed).sample(logits, requests)
    assert not any(out.nonfinite)
    return out.token_ids


@pytest.mark.parametrize("option", OPTIONS)
def test_tokens_equal_the_slow_reference(option: str) -> None:
    requests, logits = rows_of(option, 150), logits_for(150)
    before = logits.clone()
    assert mismatches(logits, requests, sample(logits, requests), ref.distribution) == 0
    assert torch.equal(logits, before)


def test_a_mixed_batch_equals_the_slow_reference() -> None:
    requests = [r for option in OPTIONS for r in rows_of(option, 8)]
    random.Random(1).shuffle(requests)
    logits = logits_for(len(requests))
    assert mismatches(logits, requests, sample(logits, requests), ref.distribution) == 0


@pytest.mark.parametrize("option", [o for o in OPTIONS if o not in ("plain", "top_k_all")])
def test_leaving_the_option_out_would_be_seen(option: str) -> None:
    """The wrong control of the comparison: the same rows without the option."""
    requests, logits = rows_of(option, 150), logits_for(150)
    tokens = sample(logits, requests)

    def without(row: list[float], r: Request) -> list[float]:
        return ref.distribution(row, make_request(r.request_id, r.prompt_token_ids, r.output_token_ids))

    assert mismatches(logits, requests, tokens, without) > 5


def test_the_order_of_top_k_and_top_p_would_be_seen() -> None:
    """top_p over the whole vocabulary, then top_k, is another distribution."""
    requests, logits = rows_of("top_k_top_p", 400), logits_for(400)

    def swapped(row: list[float], r: Request) -> list[float]:
        p = r.sampling
        q = ref.distribution(row, make_request(r.request_id, temperature=p.temperature, top_p=p.top_p))
        k = ref.distribution(row, make_request(r.request_id, temperature=p.temperature, top_k=p.top_k))
        both = [a if b else 0.0 for a, b in zip(q, k, strict=True)]
        return [v / sum(both) for v in both]

    assert mismatches(logits, requests, sample(logits, requests), ref.distribution) == 0
    assert mismatches(logits, requests, sample(logits, requests), swapped) > 5


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 300}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_a_vocabulary_of_several_blocks(options: dict[str, Any]) -> None:
    vocab = 3 * BLOCK + 77
    assert vocab > FEW
    requests, logits = [make_request(str(i), **options) for i in range(60)], logits_for(60, vocab)
    tokens = sample(logits, requests)
    assert mismatches(logits, requests, tokens, ref.distribution) == 0
    assert len({t // BLOCK for t in tokens}) == 4


def test_ties_at_the_floor_are_all_kept_whatever_the_batch() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    alone = [sample(logits, [make_request(str(i), top_k=3)])[0] for i in range(200)]
    wide = make_request("wide", top_k=30)
    beside = [sample(logits.expand(2, -1), [make_request(str(i), top_k=3), wide])[0] for i in range(200)]
    assert alone == beside and len(set(alone)) > 30


def test_penalties_follow_the_output_step_by_step() -> None:
    sampler = Sampler(VOCAB, torch.device("cpu"))
    requests = [make_request(str(i), frequency_penalty=0.8, repetition_penalty=1.3) for i in range(20)]
    for step in range(30):
        logits = logits_for(20, seed=step)
        out = sampler.sample(logits, requests)
        assert mismatches(logits, requests, out.token_ids, ref.distribution) == 0
        for r, token in zip(requests, out.token_ids, strict=True):
            r.output_token_ids.append(token)
        if step == 10:  # as after preemption: what was kept is gone, the tokens are not
            for r in requests:
                sampler.forget(r.request_id)


def test_greedy_without_edits_touches_nothing() -> None:
    logits = logits_for(7)
    requests = [make_request(str(i), temperature=0.0) for i in range(7)]
    assert sample(logits, requests) == logits.argmax(dim=1).tolist()


def test_inverse_cdf_at_its_ends() -> None:
    p = torch.zeros(4, BLOCK + 3)
    p[:, [2, 7, BLOCK + 1]] = torch.tensor([0.25, 0.25, 0.5])
    p[3] = 0.0
    p[3, BLOCK + 2] = 1e-30
    u = torch.tensor([0.0, 1 - 2.0**-53, 0.5, 0.999], dtype=torch.float64)
    assert inverse_cdf(p, u).tolist() == [2, BLOCK + 1, BLOCK + 1, BLOCK + 2]


def test_inverse_cdf_never_draws_the_impossible() -> None:
    g = torch.Generator().manual_seed(5)
    p = torch.rand(500, 2 * BLOCK + 9, generator=g) * (torch.rand(500, 2 * BLOCK + 9, generator=g) < 0.01)
    u = torch.rand(500, generator=g, dtype=torch.float64)
    u[:100] = 1 - 2.0**-53
    assert (p.gather(1, inverse_cdf(p, u)[:, None]) > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [VOCAB, 50_000])
def test_cuda_gives_the_tokens_of_the_cpu_and_waits_only_at_the_end(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any wait for the device raises, except in the final copies, which are `tolist`."""
    requests = [r for option in OPTIONS for r in rows_of(option, 8)]
    for r in requests[::5]:
        r.sampling.logprobs = 3
    logits = logits_for(len(requests), vocab)
    expected = sample(logits, requests)
    there, sampler = logits.cuda(), Sampler(vocab, torch.device("cuda"))
    sampler.sample(there, requests)
    to_list, waits = torch.Tensor.tolist, []

    def waiting(tensor: torch.Tensor) -> list[Any]:
        waits.append(tensor.is_cuda)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return to_list(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    torch.cuda.set_sync_debug_mode("error")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", waiting)
            out = sampler.sample(there, requests)
        with pytest.raises(RuntimeError, match="synchronizing"):
            bool(there[0, 0] > 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == [False] * 3
    assert out.token_ids == expected
