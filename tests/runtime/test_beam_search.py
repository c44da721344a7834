"""Beam search against brute force on a toy distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from qengine.beam_search import BeamSearchParams, Candidates, beam_search
from qengine.errors import RequestError

VOCAB, EOS = 5, 4


class Toy:
    """A random distribution after each sequence."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls: list[int] = []

    def logprobs(self, ids: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{self.seed} {ids}")
        weights = [rng.random() ** 3 + 1e-3 for _ in range(VOCAB)]
        return [math.log(w / sum(weights)) for w in weights]

    def next_tokens(self, sequences: list[list[int]], k: int) -> list[Candidates]:
        self.calls.append(len(sequences))
        return [sorted(enumerate(self.logprobs(tuple(s))), key=lambda c: -c[1])[:k] for s in sequences]


def all_ends(toy: Toy, prompt: tuple[int, ...], steps: int, eos: set[int]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence that ends by an end-of-sequence token or by length, with its log-probability."""
    for length in range(1, steps + 1):
        for ids in itertools.product(range(VOCAB), repeat=length):
            if any(i in eos for i in ids[:-1]) or (length < steps and ids[-1] not in eos):
                continue
            yield ids, sum(toy.logprobs(prompt + ids[:i])[ids[i]] for i in range(length))


def best(toy: Toy, prompt: tuple[int, ...], steps: int, eos: set[int], penalty: float) -> list[tuple[int, ...]]:
    def score(end: tuple[tuple[int, ...], float]) -> float:
        length = len(end[0]) - (end[0][-1] in eos)
        return end[1] / max(length, 1) ** penalty

    return [ids for ids, _ in sorted(all_ends(toy, prompt, steps, eos), key=score, reverse=True)]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_beams_wide_enough_find_the_best(seed: int, penalty: float, ignore_eos: bool) -> None:
    toy, width = Toy(seed), VOCAB**3
    params = BeamSearchParams(beam_width=width, max_tokens=4, length_penalty=penalty, ignore_eos=ignore_eos)
    found = [b.token_ids for b in beam_search(toy.next_tokens, [1, 2], params, [EOS])]
    expected = best(toy, (1, 2), 4, set() if ignore_eos else {EOS}, penalty)
    assert found == expected[:width]


def test_the_length_penalty_would_be_missed() -> None:
    """The wrong control: with another penalty the order differs."""
    orders = {tuple(best(Toy(0), (1, 2), 4, {EOS}, p)[:10]) for p in (0.0, 1.0, 2.0)}
    assert len(orders) == 3


@pytest.mark.parametrize("seed", range(6))
def test_narrow_beams_keep_the_likeliest_of_each_step(seed: int) -> None:
    toy = Toy(seed)
    found = beam_search(toy.next_tokens, [3], BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True), [EOS])
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(5):
        grown = [((*ids, t), total + lp) for ids, total in beams for t, lp in enumerate(toy.logprobs((3, *ids)))]
        beams = sorted(grown, key=lambda b: -b[1])[:2]
    assert [b.token_ids for b in found] == [ids for ids, _ in beams]
    assert [b.cum_logprob for b in found] == pytest.approx([total for _, total in beams])
    assert all(b.finish_reason == "length" for b in found)
    assert toy.calls == [1, 2, 2, 2, 2]


def test_one_beam_is_greedy() -> None:
    toy, ids = Toy(3), (1,)
    for _ in range(6):
        row = toy.logprobs(ids)
        ids = (*ids, row.index(max(row)))
    (beam,) = beam_search(toy.next_tokens, [1], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True), [EOS])
    assert beam.token_ids == ids[1:]


def test_finished_beams_say_so() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=3)
    found = beam_search(Toy(1).next_tokens, [1], params, [EOS, 3])
    assert all((b.finish_reason == "stop") == (b.token_ids[-1] in (EOS, 3)) for b in found)
    assert {b.finish_reason for b in found} <= {"stop", "length"}


@pytest.mark.parametrize(
    "options", [{"beam_width": 0}, {"beam_width": True}, {"max_tokens": 0}, {"temperature": 0.5}], ids=str
)
def test_odd_parameters_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RequestError) as e:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options})
    assert e.value.param in options
