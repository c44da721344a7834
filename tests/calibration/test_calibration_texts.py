"""Calibration text: what is read, how rows are packed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qengine.errors import ConfigError
from qengine.text.tokenizer import Tokenizer
from qengine_calibration.texts import BUILT_IN, built_in_rows, load_texts
from toy_models import make_bytetok


@pytest.fixture
def tok(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(make_bytetok(tmp_path / "tok"))


def test_built_in_set(tok: Tokenizer) -> None:
    found = load_texts(None, tok, length=512)
    assert len(BUILT_IN) == 3 and found.rows_given == found.rows_used == len(list(built_in_rows()))
    assert found.tokens > 13_000 and found.source == "the built-in texts"
    assert all(len(s) == 512 for s in found.sequences[:-1]) and 0 < len(found.sequences[-1]) <= 512
    assert load_texts(None, tok).digest == found.digest != load_texts(None, tok, length=256).digest


def test_rows_are_packed_and_split_in_order(tok: Tokenizer, tmp_path: Path) -> None:
    rows = ["", "a" * 5, "b" * 700, "  ", "c" * 30]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": r}) for r in rows) + "\n")
    found = load_texts(file, tok, length=100)
    assert (found.rows_given, found.rows_used) == (5, 3)
    assert [i for s in found.sequences for i in s] == list(("a" * 5 + "b" * 700 + "c" * 30).encode())
    few = load_texts(file, tok, length=100, samples=3)
    assert len(few.sequences) == 3 and few.rows_given == 5 and few.rows_used == 2


def test_c26_rows(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [""] * 20 + ["x"] * 10 + ["y" * 5000] * 4 + ["word " * 20] * 30
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = load_texts(file, tok)
    assert (found.rows_given, found.rows_used) == (64, 44) and found.tokens == 10 + 20_000 + 3000
    assert "44 of 64 rows used" in found.describe() and found.facts()["tokens"] == found.tokens


def test_conversations_go_through_the_template(tok: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    one = {"messages": [{"role": "user", "content": "hi " * 100}, {"role": "assistant", "content": "yes"}]}
    two = {"conversations": [{"from": "human", "value": "hi " * 100}, {"from": "gpt", "value": "yes"}]}
    texts = []
    for row in (one, two):
        file.write_text(json.dumps(row))
        texts.append(tok.decode([i for s in load_texts(file, tok).sequences for i in s]))
    assert texts[0] == texts[1] == "<user>" + "hi " * 100 + "\n<assistant>yes\n"
    bare = Tokenizer.load(make_bytetok(tmp_path / "bare", chat_template=None))
    with pytest.raises(ConfigError, match="no chat template"):
        load_texts(file, bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "short", r"5 tokens in 1 of 1 rows; need: at least 256"),
        ("a.csv", "x", "a .txt, .jsonl or .parquet file"),
        ("a.jsonl", '{"text": "a"}\n{', "line 2 is not JSON"),
        ("a.jsonl", '{"label": 3}', "has no text; have: label"),
        ("a.jsonl", "[1, 2]", "neither a text nor a list of messages"),
    ],
)
def test_bad_files(name: str, content: str, message: str, tok: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_texts(tmp_path / name, tok)


def test_missing_file(tok: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_texts(tmp_path / "none.txt", tok)
