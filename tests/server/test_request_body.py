"""Bodies are decoded strictly: every wrong one names its field."""

import pytest
from msgspec import json

from qengine.errors import RequestError
from qengine.sampling_params import SamplingParams
from qengine.server.body import decode_body
from qengine.server.errors import ApiError
from qengine.server.prompts import decode_prompts
from qengine.server.schemas import ChatRequest, CompletionRequest, refuse_unbuilt, sampling_fields

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"prompt": "a", "temprature": 1}', "temprature", "temperature"),
        (b'{"prompt": "a", "zzz": 1}', "zzz", "leave it out"),
        (b'{"prompt": "a", "max_completion_tokens": 1}', "max_completion_tokens", "would work: max_tokens"),
        (b'{"prompt": "a", "return_token_ids": true}', "return_token_ids", "leave it out"),
        (b'{"prompt": "a", "spaces_between_special_tokens": 1}', "spaces_between_special_tokens", "leave it out"),
        (b'{"prompt": "a", "n": "2"}', "n", "int"),
        (b'{"prompt": "a", "n": 1.5}', "n", "int"),
        (b'{"prompt": "a", "n": true}', "n", "int"),
        (b'{"prompt": "a", "stop": [1]}', "stop[0]", "str"),
        (b'{"prompt": "a", "stream_options": {"x": 1}}', "stream_options.x", "unknown field"),
        (b"{}", "prompt", "missing field"),
        (b"[]", None, "object"),
        (b"", None, "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', None, "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "range"),
        (b'{"prompt": "a", "user": "\xff"}', None, "UTF-8"),
        (b'{"prompt": "a", "user": "\\ud800"}', None, "not valid JSON"),
        (b'{"metadata": ' + b"[" * 100_000, None, "nested too deeply"),
    ],
)
def test_wrong_bodies_are_named(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(body, CompletionRequest)
    detail = caught.value.body.error
    assert caught.value.status == 400
    assert detail.param == param
    assert words in detail.message
    assert "\n" not in detail.message


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "high"},
        {"structured_outputs": {"json": {}}},
    ],
)
def test_unbuilt_fields_are_refused_by_name(field: dict) -> None:
    body = decode_body(json.encode({"messages": MESSAGES, **field}), ChatRequest)
    with pytest.raises(RequestError, match=next(iter(field))) as caught:
        refuse_unbuilt(body)
    assert caught.value.param == next(iter(field))


def test_fields_that_ask_for_nothing_pass() -> None:
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "modalities": ["text"],
        "logit_bias": None,
        "stop": None,
    }
    refuse_unbuilt(decode_body(json.encode({"messages": MESSAGES, **harmless}), ChatRequest))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"--1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_sampling_fields_out_of_range_are_named(fields: dict, param: str) -> None:
    body = decode_body(json.encode({"prompt": "a", **fields}), CompletionRequest)
    with pytest.raises(RequestError) as caught:
        SamplingParams(**sampling_fields(body))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a,b", ["a,b"]),
        ([1, 2], [[1, 2]]),
        (["a", "[1]"], ["a", "[1]"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
        ("[1, 2]", ["[1, 2]"]),
    ],
)
@pytest.mark.parametrize("blank", [b"", b" \n "])
def test_prompt_forms(prompt: object, expected: list, blank: bytes) -> None:
    encoded = json.encode(prompt)
    if b'"' not in encoded:
        encoded = encoded.replace(b"[", blank + b"[" + blank).replace(b",", b"," + blank)
    body = decode_body(b'{"prompt":' + blank + encoded + blank + b"}", CompletionRequest)
    assert decode_prompts(body.prompt, 100) == expected


@pytest.mark.parametrize(
    "prompt", [b"[]", b"null", b"1", b"{}", b"[1, null]", b'["a", 1]', b'[[1], "a"]', b"[[[1]]]", b"[1.5]"]
)
def test_wrong_prompts_are_refused(prompt: bytes) -> None:
    body = decode_body(b'{"prompt":' + prompt + b"}", CompletionRequest)
    with pytest.raises(RequestError) as caught:
        decode_prompts(body.prompt, 100)
    assert caught.value.param == "prompt"


def test_too_many_ids_are_refused_before_they_are_decoded() -> None:
    for prompt in ([7] * 100, [[1], [7] * 100]):
        body = decode_body(json.encode({"prompt": prompt}), CompletionRequest)
        with pytest.raises(RequestError, match="100 tokens; need: at most 99"):
            decode_prompts(body.prompt, 100)


def test_sampling_fields_arrive() -> None:
    fields = {"temperature": 0, "top_p": 0, "top_k": 3, "min_p": 0.1, "seed": 2**64 - 1, "stop": "x", "n": 2}
    fields |= {"logit_bias": {"7": -1.5}, "stop_token_ids": [4], "bad_words": ["b"], "ignore_eos": True, "best_of": 2}
    body = decode_body(json.encode({"prompt": "a", **fields}), CompletionRequest)
    p = SamplingParams(**sampling_fields(body))
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.n) == (0, 0, 3, 0.1, 2**64 - 1, 2)
    assert (p.stop, p.stop_token_ids, p.bad_words, p.logit_bias) == (["x"], [4], ["b"], {7: -1.5})
    assert p.ignore_eos is True
