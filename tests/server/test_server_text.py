"""CASES C23: the text that clients see, streamed and whole, is byte-exact and ends where it should."""

from __future__ import annotations

from dataclasses import dataclass

import openai
import pytest

CHAIN_1 = "né世界😀".encode()


@dataclass
class Answer:
    text: str
    finish_reason: str
    stop_reason: object
    deltas: list[str]


def whole(client: openai.OpenAI, prompt: str, **fields) -> Answer:
    found = client.completions.create(model="toy", prompt=prompt, temperature=0, **fields)
    [choice] = found.choices
    return Answer(choice.text, choice.finish_reason, choice.stop_reason, [choice.text])


def streamed(client: openai.OpenAI, prompt: str, **fields) -> Answer:
    deltas, ends = [], []
    for chunk in client.completions.create(model="toy", prompt=prompt, temperature=0, stream=True, **fields):
        [choice] = chunk.choices
        deltas.append(choice.text)
        if choice.finish_reason:
            ends.append((choice.finish_reason, choice.stop_reason))
    [(finish, stop)] = ends
    return Answer("".join(deltas), finish, stop, deltas)


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


@BOTH
def test_multibyte_text_arrives_whole(client: openai.OpenAI, ask) -> None:
    found = ask(client, "x", max_tokens=50)
    assert (found.text, found.finish_reason, found.stop_reason) == ("né世界😀", "stop", None)
    assert "�" not in "".join(found.deltas)


@BOTH
@pytest.mark.parametrize("count", range(1, 14))
def test_cut_inside_a_character_flushes_the_tail(client: openai.OpenAI, ask, count: int) -> None:
    found = ask(client, "x", max_tokens=count)
    assert found.text == CHAIN_1[:count].decode("utf-8", errors="replace")
    assert found.finish_reason == "length"
    assert all("�" not in delta for delta in found.deltas[:-1]), "only the end may be damaged"


@BOTH
@pytest.mark.parametrize(
    ("fields", "text", "finish", "stop"),
    [
        ({"stop": "def"}, "abc", "stop", "def"),
        ({"stop": "efX"}, "abcdefghij", "stop", None),
        ({"stop": ["hi", "gh"]}, "abcdef", "stop", "gh"),
        ({"stop": "j"}, "abcdefghi", "stop", "j"),
        ({"stop": "fgh", "max_tokens": 5}, "abcde", "length", None),
        ({"stop": "fgh", "max_tokens": 7}, "abcdefg", "length", None),
        ({"stop": "ijk"}, "abcdefghij", "stop", None),
        ({"stop": "def", "extra_body": {"include_stop_str_in_output": True}}, "abcdef", "stop", "def"),
        ({"extra_body": {"stop_token_ids": [ord("e")]}}, "abcd", "stop", ord("e")),
    ],
)
def test_stop_strings(client: openai.OpenAI, ask, fields: dict, text: str, finish: str, stop: object) -> None:
    found = ask(client, "y", **{"max_tokens": 50, **fields})
    assert (found.text, found.finish_reason, found.stop_reason) == (text, finish, stop)


def test_nothing_of_a_stop_string_is_streamed(client: openai.OpenAI) -> None:
    assert all(set(d) <= set("abc") for d in streamed(client, "y", max_tokens=50, stop="def").deltas)


@BOTH
def test_eos_from_a_list_in_generation_config(client: openai.OpenAI, ask) -> None:
    found = ask(client, "z", max_tokens=50)
    assert (found.text, found.finish_reason) == ("A", "stop")


@BOTH
def test_ignore_eos(client: openai.OpenAI, ask) -> None:
    found = ask(client, "x", max_tokens=28, extra_body={"ignore_eos": True})
    assert (found.text, found.finish_reason) == ("né世界😀" * 2, "length")


def test_chat_streams_the_same_text(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "toy", "messages": messages, "temperature": 0}
    found = client.chat.completions.create(**fields).choices[0]
    assert (found.message.content, found.message.role, found.finish_reason) == ("né世界😀", "assistant", "stop")
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "né世界😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    plain = client.chat.completions.create(**fields, extra_body={"add_generation_prompt": False})
    assert plain.choices[0].message.content == "abcdefghij"
