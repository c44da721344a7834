"""Text for an evaluation: rows, windows, limits, and the built-in held-out text."""

from __future__ import annotations

import itertools
from importlib import resources
from pathlib import Path

import pytest

from qengine.errors import ConfigError
from qengine.text import Tokenizer
from qengine_calibration.eval_text import TextSource, pack
from qengine_calibration.texts import built_in_rows
from toy_models import BOS, make_bytetok


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_bytetok(tmp_path_factory.mktemp("tok")))


def jsonl(path: Path, *lines: str) -> TextSource:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return TextSource.open(str(path))


def test_rows_are_joined_and_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", '{"text": "%s"}' % ("x" * 150), "", '{"text": "  "}', '{"text": "short"}')
    w = pack(source, [tokenizer], 64, 10_000)
    assert bytes(itertools.chain(*w.ids)) == b"x" * 150 + b"\n\nshort\n\n"
    assert [len(ids) for ids in w.ids] == [64, 64, 31]
    assert (w.rows_given, w.rows_used, w.tokens, w.positions, w.bos) == (4, 2, 159, 156, None)


def test_the_limit_counts_every_row_and_uses_few(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", *['{"text": "%s"}' % ("y" * 98)] * 30)
    w = pack(source, [tokenizer], 64, 250)
    assert (w.rows_given, w.rows_used, w.tokens) == (30, 3, 250)


def test_bos_starts_every_window_where_the_tokenizer_adds_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = Tokenizer.load(make_bytetok(tmp_path, add_bos=True))
    source = jsonl(tmp_path / "a.jsonl", '{"text": "%s"}' % ("z" * 148))
    w = pack(source, [own], 51, 10_000)
    assert [ids[0] for ids in w.ids] == [BOS] * 3 and [len(ids) for ids in w.ids] == [51, 51, 51]
    assert w.tokens == w.positions == 150  # with BOS in front, every token of the text is predicted
    assert list(itertools.chain(*w.ids)).count(BOS) == 3


def test_conversations_go_through_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    said = '{"messages": [{"role": "user", "content": "%s"}]}' % ("hello " * 30)
    w = pack(jsonl(tmp_path / "a.jsonl", said), [tokenizer], 512, 10_000)
    assert bytes(w.ids[0]).startswith(b"<user>hello hello")


def test_too_little_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"have: 7 tokens in 1 of 2 rows; need: at least 100"):
        pack(jsonl(tmp_path / "a.jsonl", '{"text": "short"}', '""'), [tokenizer], 64, 1000)


def test_other_tokens_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Other(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text, add_special_tokens)[:-1]

    other = Other.load(make_bytetok(tmp_path))
    source = jsonl(tmp_path / "a.jsonl", '{"text": "%s"}' % ("z" * 148))
    assert pack(source, [tokenizer, tokenizer], 64, 1000).tokens == 150
    with pytest.raises(ConfigError, match="different tokens"):
        pack(source, [tokenizer, other], 64, 1000)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        TextSource.open(str(tmp_path / "no.txt"))


def test_held_out_text() -> None:
    """Over 20,000 tokens for usual tokenizers (about 4 bytes a token), under 200 KiB, no row of the calibration set."""
    source = TextSource.open(None)
    rows = [row for row in source.rows() if isinstance(row, str)]
    size = sum(len(row.encode()) for row in rows)
    assert 90_000 < size < 200 << 10
    calibration = {line.strip() for row in built_in_rows() for line in str(row).splitlines() if len(line) > 40}
    assert calibration and not calibration & {line.strip() for row in rows for line in row.splitlines()}
    together = "\n".join(rows)
    for part in ("def ", "#include", "SELECT", "Werkstatt", "茶馆", "часовщик", "Execution model"):
        assert part in together
    licence = (resources.files("qengine_calibration") / "data" / "heldout-LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence and "Apache License 2.0" in licence
