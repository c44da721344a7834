"""Calibration text: what is read, how rows are packed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from qengine.errors import ConfigError
from qengine.text.tokenizer import Tokenizer
from qengine_calibration import data_files
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
    parts = [{"type": "text", "text": "hi " * 100}]
    three = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]}
    texts = []
    for row in (one, two, three):
        file.write_text(json.dumps(row))
        texts.append(tok.decode([i for s in load_texts(file, tok).sequences for i in s]))
    assert texts[0] == texts[1] == texts[2] == "<user>" + "hi " * 100 + "\n<assistant>yes\n"
    bare = Tokenizer.load(make_bytetok(tmp_path / "bare", chat_template=None))
    with pytest.raises(ConfigError, match="no chat template"):
        load_texts(file, bare)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "short", r"5 tokens in 1 of 1 rows; need: at least 256"),
        ("a.txt", b"na\xefve", r"a\.txt is not UTF-8; have: byte 0xef at offset 2"),
        ("a.txt", "naive".encode("utf-16"), "a.txt is not UTF-8; have: byte 0xff at offset 0"),
        ("a.jsonl", b'"ok"\n"na\xefve"', r"a\.jsonl, line 2 is not UTF-8; have: byte 0xef at offset 3"),
        ("a.jsonl", '{"text": null}', "0 tokens in 0 of 1 rows.*--data-field"),
        ("a.jsonl", '"ok"\n"\\ud800"', r"a\.jsonl, row 2: .*Unicode"),
        ("a.jsonl", '"ok"\n[{"role": "user", "content": 3}]', r"a\.jsonl, row 2: messages\[0\]\.content has the wrong"),
        ("a.jsonl", '[{"content": "hi"}]', r"a\.jsonl, row 1: messages\[0\] has no role"),
        ("a.csv", "x", "a .txt, .jsonl or .parquet file"),
        ("a.jsonl", '{"text": "a"}\n{', "line 2 is not JSON"),
        ("a.jsonl", '{"label": 3}', "has no text; have: label"),
        ("a.jsonl", "[1, 2]", "neither a text nor a list of messages"),
    ],
)
def test_bad_files(name: str, content: str | bytes, message: str, tok: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        load_texts(tmp_path / name, tok)


def test_rows_that_say_null_are_blank_and_a_byte_order_mark_is_no_text(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": "a" * 300}, {"text": None}, {"messages": None, "text": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = load_texts(tmp_path / "a.jsonl", tok)
    assert (found.rows_given, found.rows_used, found.tokens) == (3, 2, 301)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"a" * 299 + b"\r\n---\r\nb")
    assert [i for s in load_texts(tmp_path / "a.txt", tok).sequences for i in s] == list(b"a" * 299 + b"b")


def test_missing_file(tok: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_texts(tmp_path / "none.txt", tok)


# ---- parquet, and data sets on the hub


def test_parquet_rows_are_those_of_jsonl(tok: Tokenizer, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"id": i, "text": f"row {i} " * 30, "quality": "good"} for i in range(70)]  # more than one batch
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, two = (load_texts(tmp_path / f"a.{kind}", tok) for kind in ("jsonl", "parquet"))
    assert one.digest == two.digest and two.rows_used == 70
    chats = [{"messages": [{"role": "user", "content": "hi " * 200}]}]
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "c.parquet")
    assert tok.decode(load_texts(tmp_path / "c.parquet", tok).sequences[0]).startswith("<user>hi hi")
    other = load_texts(tmp_path / "a.parquet", tok, field="quality", least_tokens=16)
    assert tok.decode(other.sequences[0]).startswith("goodgood") and other.tokens == 280
    with pytest.raises(ConfigError, match=r"row 1 has no text; have: id, text, quality; need: title"):
        load_texts(tmp_path / "a.parquet", tok, field="title")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"bad\.parquet is no parquet file"):
        load_texts(tmp_path / "bad.parquet", tok)


def test_parquet_without_its_reader(tmp_path: Path, tok: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pyarrow.*pip install 'qengine-llm\[parquet\]'"):
        load_texts(tmp_path / "a.parquet", tok)


class Hub:
    """A hub with one data set; keeps what it was asked for."""

    def __init__(self, files: list[str], content: Path, converted: list[str] | None = None) -> None:
        self.files, self.content, self.converted, self.asked = files, content, converted, []

    def list_repo_files(self, name: str, *, repo_type: str, revision: str | None = None) -> list[str]:
        self.asked.append((name, repo_type, revision))
        assert repo_type == "dataset"
        return self.files if revision is None else self.converted or []

    def hf_hub_download(self, name: str, file: str, *, repo_type: str, revision: str | None = None) -> str:
        self.asked.append((name, file, revision))
        return str(self.content)


@pytest.mark.parametrize(
    ("files", "data", "chosen"),
    [
        (["README.md", "data/test.jsonl", "data/train-0.jsonl", "LICENSE.txt"], "o/d", "data/train-0.jsonl"),
        (["b.jsonl", "a.jsonl", "c.txt"], "o/d", "a.jsonl"),
        (["train.txt", "x.parquet"], "o/d", "x.parquet"),
        (["train.jsonl", "test.jsonl"], "o/d:test.jsonl", "test.jsonl"),
    ],
)
def test_a_data_set_on_the_hub(
    files: list[str], data: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(files, tmp_path / "content")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", hub.list_repo_files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    said: list[str] = []
    assert data_files.find_data(data, said.append) == (tmp_path / "content", f"o/d:{chosen}")
    assert hub.asked[-1] == ("o/d", chosen, None) and said[-1] == f"--data: {chosen} of o/d"


def test_data_sets_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(["data.csv"], tmp_path / "c", ["default/train/0.parquet"])
    monkeypatch.setattr(huggingface_hub, "list_repo_files", hub.list_repo_files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    data_files.find_data("o/d")
    assert hub.asked[-1] == ("o/d", "default/train/0.parquet", "refs/convert/parquet")
    hub.converted = None
    with pytest.raises(ConfigError, match=r"o/d has no file that is read here; have: data\.csv"):
        data_files.find_data("o/d")
    with pytest.raises(ConfigError, match=r"o/d has no b\.jsonl"):
        data_files.find_data("o/d:b.jsonl")

    def away(*a: object, **k: object) -> list[str]:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", away)
    with pytest.raises(ConfigError, match=r"the hub is out of reach \(no route\)"):
        data_files.find_data("o/d")
    assert data_files.find_data("texts/a.jsonl") == (Path("texts/a.jsonl"), "texts/a.jsonl")  # a file that is missing
    with pytest.raises(ConfigError, match="the folder"):
        data_files.find_data(str(tmp_path))
