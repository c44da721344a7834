"""The draws follow the distribution, and depend on seed, place and logits only."""

from __future__ import annotations

import math
import zlib
from collections import Counter

import pytest
import torch

import sampling_reference as ref
from qengine.runtime.random_streams import stream
from qengine.runtime.sampler import Sampler
from sampling_reference import make_request, uniform

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.9, 0.9]


def chi_square(counts: Counter[int], probabilities: list[float], n: int) -> float:
    """Standard deviations above the mean of the chi-square statistic; infinite if the impossible was drawn."""
    if any(counts[i] and not q for i, q in enumerate(probabilities)):
        return math.inf
    terms = [(counts[i] - n * q) ** 2 / (n * q) for i, q in enumerate(probabilities) if q]
    free = len(terms) - 1
    return (sum(terms) - free) / math.sqrt(2 * free)


OPTIONS = [
    ({"temperature": 1.0}, {"temperature": 1.25}),
    ({"temperature": 0.7, "top_k": 6}, {"temperature": 0.7, "top_k": 5}),
    ({"top_p": 0.8}, {"top_p": 0.9}),
    ({"min_p": 0.2}, {"min_p": 0.3}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.1}),
]


@pytest.mark.parametrize(("options", "wrong"), OPTIONS, ids=str)
@pytest.mark.parametrize("seeded", [False, True])
def test_draws_follow_the_distribution(options: dict[str, float], wrong: dict[str, float], seeded: bool) -> None:
    n = 8000
    requests = [make_request(str(i), **options, seed=i if seeded else None) for i in range(n)]
    logits = torch.tensor(LOGITS).expand(n, -1)
    counts = Counter(Sampler(len(LOGITS), torch.device("cpu")).sample(logits, requests).token_ids)
    assert chi_square(counts, ref.distribution(LOGITS, requests[0]), n) < 4
    assert chi_square(counts, ref.distribution(LOGITS, make_request(**wrong)), n) > 4


def test_the_places_of_one_request_are_independent() -> None:
    """Pairs of neighbouring tokens of one stream, and of equal places of neighbouring seeds, are uniform."""
    one = stream("one stream")
    for pairs in (
        [(uniform(one, i), uniform(one, i + 1)) for i in range(20_000)],
        [(uniform(stream(f"{i}"), 0), uniform(stream(f"{i + 1}"), 0)) for i in range(20_000)],
    ):
        cells = Counter(int(a * 8) * 8 + int(b * 8) for a, b in pairs)
        assert chi_square(cells, [1 / 64] * 64, len(pairs)) < 4
    stuck = Counter(int(uniform(one, i) * 8) * 9 for i in range(20_000))
    assert chi_square(stuck, [1 / 64] * 64, 20_000) > 4


def generate(names: list[str], steps: int, *, engine_seed: int = 0, restart: bool = False, **sampling: object) -> dict:
    """Tokens of each request, from logits that depend on the request's name and place only."""
    sampler = Sampler(50, torch.device("cpu"), engine_seed)
    requests = [make_request(name, **sampling) for name in names]
    for step in range(steps):
        rows = [
            torch.randn(50, generator=torch.Generator().manual_seed(zlib.crc32(f"{r.request_id[0]} {step}".encode())))
            for r in requests
        ]
        if restart and step % 3 == 2:
            sampler = Sampler(50, torch.device("cpu"), engine_seed)
        for r, token in zip(requests, sampler.sample(torch.stack(rows), requests).token_ids, strict=True):
            r.output_token_ids.append(token)
    return {r.request_id: r.output_token_ids for r in requests}


@pytest.mark.parametrize("sampling", [{"seed": 5}, {}, {"seed": 5, "top_p": 0.8}, {"seed": -1, "top_k": 9}], ids=str)
def test_batch_and_preemption_change_nothing(sampling: dict[str, object]) -> None:
    among = generate(["a", "b", "c", "d"], 20, **sampling)
    assert generate(["c"], 20, **sampling)["c"] == among["c"]
    assert generate(["d", "c", "b"], 20, restart=True, **sampling)["c"] == among["c"]


def test_streams_differ_where_they_should() -> None:
    by_seed = [generate(["a"], 20, seed=s)["a"] for s in (0, 1, 2**64 - 1)]
    assert len({tuple(t) for t in by_seed}) == 3
    twins = generate(["a1", "a2"], 20)
    assert twins["a1"] != twins["a2"]
    assert generate(["a1"], 20, engine_seed=1)["a1"] != twins["a1"]
    seeded = generate(["a1", "a2"], 20, seed=9, engine_seed=3)
    assert seeded["a1"] == seeded["a2"] == generate(["a1"], 20, seed=9)["a1"]
