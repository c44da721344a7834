"""Logprobs are raw log-softmax, finite, with the chosen token; non-finite rows end alone."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

from qengine.runtime.logprobs import LOWEST
from qengine.runtime.sampler import Sampler, logprobs_of
from sampling_reference import make_request

INF = float("inf")


def logits_for(count: int, vocab: int = 30) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(2)) * 3


def test_logprobs_are_raw_log_softmax() -> None:
    logits = logits_for(6)
    options = {"temperature": 0.3, "top_k": 3, "repetition_penalty": 1.7, "logit_bias": {4: 9.0}}
    requests = [make_request(str(i), **options, logprobs=i % 4) for i in range(5)] + [make_request("none")]
    out = Sampler(30, torch.device("cpu")).sample(logits, requests)
    expected = logits.double().log_softmax(dim=1)
    assert out.logprobs[5] is None
    for i, found in enumerate(out.logprobs[:5]):
        assert found is not None and found.token_id == out.token_ids[i]
        assert found.logprob == pytest.approx(expected[i, found.token_id].item(), abs=1e-5)
        assert found.rank == 1 + (expected[i] > expected[i, found.token_id]).sum().item()
        top = expected[i].topk(i % 4)
        assert found.top_ids == top.indices.tolist()
        assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    scaled = (logits.double() / 0.3).log_softmax(dim=1)
    assert out.logprobs[0].logprob != pytest.approx(scaled[0, out.token_ids[0]].item(), abs=1e-2)


def test_what_is_impossible_stays_json() -> None:
    logits = torch.full((1, 5), -INF)
    logits[0, 3] = 1.0
    (found,) = logprobs_of(logits, [1], 5)
    assert found is not None and found.logprob == LOWEST and found.rank == 2
    assert found.top_ids[0] == 3 and found.top_logprobs == [0.0, *[LOWEST] * 4]
    json.loads(msgspec.json.encode(found), parse_constant=pytest.fail)


def test_prompt_logprobs_of_many_rows() -> None:
    logits = logits_for(9)
    ids = list(range(9))
    found = logprobs_of(logits, ids, 2)
    expected = logits.log_softmax(dim=1)
    assert [f.logprob for f in found] == pytest.approx(expected[range(9), ids].tolist(), abs=1e-5)
    assert all(len(f.top_ids) == 2 for f in found)
    assert len(logprobs_of(logits, ids, 999)[0].top_ids) == 30


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 4}, {"logit_bias": {2: 1}}], ids=str
)
def test_a_nonfinite_row_ends_alone(sampling: dict[str, object]) -> None:
    logits = logits_for(6)
    requests = [make_request(str(i), **sampling, logprobs=1) for i in range(6)]
    clean = Sampler(30, torch.device("cpu")).sample(logits, requests)
    logits[1, 7] = float("nan")
    logits[2, 7] = INF
    logits[3] = -INF
    logits[4, 7] = -INF
    out = Sampler(30, torch.device("cpu")).sample(logits, requests)
    assert out.nonfinite == [False, True, True, True, False, False]
    assert [out.token_ids[i] for i in (0, 5)] == [clean.token_ids[i] for i in (0, 5)]
    assert [p is None for p in out.logprobs] == out.nonfinite
    assert all(0 <= t < 30 for t in out.token_ids)


def test_a_nan_under_a_mask_is_seen() -> None:
    logits = logits_for(1)
    logits[0, 7] = float("nan")
    request = make_request(temperature=0.0, bad_words_token_ids=[[7]])
    assert Sampler(30, torch.device("cpu")).sample(logits, [request]).nonfinite == [True]


def test_a_row_with_everything_forbidden_is_an_error() -> None:
    request = make_request(bad_words_token_ids=[[i] for i in range(30)])
    assert Sampler(30, torch.device("cpu")).sample(logits_for(1), [request]).nonfinite == [True]
