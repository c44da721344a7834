"""From times to figures: each against a plain reading of its definition."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from qengine.bench.figures import Timing, percentile, samples, spread, summary, table
from qengine.bench.prompts import asks, token_ids, words


def timings() -> list[Timing]:
    return [
        Timing(prompt_tokens=10, start=1.0, times=[1.5, 1.6, 1.9], tokens=3),
        Timing(prompt_tokens=4, start=2.0, times=[2.1], tokens=1),
        Timing(prompt_tokens=4, start=2.0, times=[2.4, 2.6], tokens=4),  # two pieces that bring four tokens
        Timing(prompt_tokens=7, start=2.0, error="no end"),
    ]


def test_metrics_are_what_their_names_say() -> None:
    found = samples(timings()[:3])
    assert found["ttft"] == pytest.approx([0.5, 0.1, 0.4])
    assert found["itl"] == pytest.approx([0.1, 0.3, 0.2])
    assert found["tpot"] == pytest.approx([0.2, 0.2 / 3])
    assert found["e2el"] == pytest.approx([0.9, 0.1, 0.6])


def test_totals_leave_out_what_failed() -> None:
    found = summary(timings(), 2.0, ["ttft"], [50.0])
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (18, 8)
    assert found["request_throughput"] == 1.5 and found["output_throughput"] == 4.0
    assert found["total_token_throughput"] == 13.0
    assert found["p50_ttft_ms"] == pytest.approx(400) and "p50_itl_ms" not in found
    shown = "\n".join(table(found, ["ttft", "itl"], [50.0]))
    assert "4.0 output tokens/s" in shown and "400.00" in shown and "itl" not in shown


@pytest.mark.parametrize("p", [0, 10, 50, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(p: float, count: int) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)))


def test_spread_is_in_milliseconds() -> None:
    found = spread("itl", [0.001, 0.003], [90.0])
    assert found["mean_itl_ms"] == pytest.approx(2.0) and found["std_itl_ms"] == pytest.approx(1.0)
    assert "p90_itl_ms" in found and spread("itl", [], [90.0]) == {}


def test_fixed_lengths_and_lengths_around_them() -> None:
    assert {(a.input_len, a.output_len) for a in asks("random", 20, 64, 8, 0.0, seed=1)} == {(64, 8)}
    around = asks("random", 300, 100, 50, 0.5, seed=1)
    inputs = [a.input_len for a in around]
    assert min(inputs) >= 50 and max(inputs) <= 150 and len(set(inputs)) > 30


def test_chat_lengths_are_spread() -> None:
    made = asks("sharegpt-like", 2000, 0, 0, 0.0, seed=3)
    inputs, outputs = [a.input_len for a in made], [a.output_len for a in made]
    assert 55 < statistics.median(inputs) < 80 and 115 < statistics.median(outputs) < 155
    assert statistics.mean(inputs) > 1.5 * statistics.median(inputs) and max(inputs) <= 1024
    short = asks("sharegpt-like", 500, 0, 0, 0.0, seed=3, most=100)
    assert max(a.input_len + a.output_len for a in short) <= 100 and min(a.input_len for a in short) >= 1


def test_the_same_seed_gives_the_same_prompts_and_another_others() -> None:
    def prompts(seed: int) -> list[list[int]]:
        return [token_ids(a, 3, 100) for a in asks("random", 5, 16, 4, 0.0, seed)]

    assert prompts(1) == prompts(1) != prompts(2)
    one, other = prompts(1)[:2]
    assert one[:3] == other[:3] and one[3:] != other[3:] and len(one) == 19


def test_reserved_ids_and_words() -> None:
    [ask] = asks("random", 1, 500, 1, 0.0, seed=0)
    assert set(token_ids(ask, 0, 8, reserved=(2, 5))) == {0, 1, 3, 4, 6, 7}
    assert len(words(ask, 4).split()) == 504
