"""SamplingParams refuses whatever Python callers and JSON can hold, with the field's name and never with a crash."""

from __future__ import annotations

from typing import Any

import pytest

from qengine.errors import RequestError
from qengine.runtime.sampling_checks import checked_sampling
from qengine.sampling_params import SamplingParams

HUGE = 10**5000
"""Beyond every float, and longer than what Python prints of an integer."""
WORDS = ("huge", "minus-huge", "nan", "inf", "true", "text")
NUMBERS = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
NUMBERS += ("repetition_penalty", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("nan"), float("inf"), True, "1"], ids=WORDS)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as e:
        SamplingParams(**{name: value})
    assert e.value.param == name and len(str(e.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"a"}),
        ("bad_words", "abc"),
        ("bad_words", [""]),
        ("logit_bias", [1]),
        ("logit_bias", {1: HUGE}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {1: True}),
    ],
)
def test_a_collection_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as e:
        SamplingParams(**{name: value})
    assert e.value.param == name


def test_none_is_an_empty_collection() -> None:
    params = checked_sampling(SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None))
    assert (params.stop, params.stop_token_ids, params.bad_words, params.logit_bias) == ([], [], [], {})
    params.stop.append("x")
    assert SamplingParams(stop=None).stop == [], "every request has lists of its own"
