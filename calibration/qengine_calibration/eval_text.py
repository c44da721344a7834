"""Text to evaluate on: rows from a file or the built-in held-out text, packed into windows of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from qengine.errors import ConfigError, RequestError
from qengine.text import Tokenizer
from qengine_calibration.data_files import Say, find_data
from qengine_calibration.texts import BREAK, Row, conversation_text, read_rows, refuse_field

BUILT_IN = "the built-in held-out text"
HELD_OUT = "heldout.txt"
SEPARATOR = "\n\n"
"""Stands between rows that share a window."""
MIN_POSITIONS = 100
"""Fewer predictions than this give no 99th percentile."""


@dataclass(frozen=True)
class TextSource:
    """Where rows come from: a file, or the built-in held-out text where `path` is None."""

    name: str
    path: Path | None
    sha256: str
    field: str | None = None

    @classmethod
    def open(cls, data: str | None, field: str | None = None, say: Say = lambda line: None) -> TextSource:
        """`data` is a local file or a data set on the hub, `field` the one of its rows that holds the text. Raises
        ConfigError for what cannot be read."""
        if data is None:
            refuse_field(field, BUILT_IN)
            return cls(BUILT_IN, None, hashlib.sha256(_held_out().encode()).hexdigest())
        path, name = find_data(data, say)
        try:
            with path.open("rb") as f:
                return cls(name, path, hashlib.file_digest(f, "sha256").hexdigest(), field)
        except OSError as e:
            raise ConfigError(f"--data: {path} cannot be read: {e.strerror}") from e

    def rows(self) -> Iterator[Row]:
        """One row at a time, in order; raises ConfigError for an unknown kind of file and for a row without text."""
        return iter(_held_out().split(BREAK)) if self.path is None else read_rows(self.path, self.field)


def _held_out() -> str:
    return (resources.files("qengine_calibration") / "data" / HELD_OUT).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Windows:
    """Token ids to score; each window is scored on its own. With `bos` every window starts with that id.

    A window of n ids gives n - 1 predictions: `positions` in all. `tokens` counts ids of the text, without BOS.
    """

    ids: list[list[int]]
    bos: int | None
    rows_given: int
    rows_used: int
    tokens: int

    @property
    def positions(self) -> int:
        return sum(len(w) - 1 for w in self.ids)


def pack(source: TextSource, tokenizers: Sequence[Tokenizer], length: int, max_tokens: int) -> Windows:
    """Join rows and cut them into windows of `length` ids, until `max_tokens` tokens of text are used.

    Long rows are split, short ones share a window, blank ones are counted and not used. All tokenizers must agree on
    every row that is used. Raises ConfigError when they don't, or when there is too little text.
    """
    bos = start_id(tokenizers[0])
    room = length - (bos is not None)
    stream: list[int] = []
    given = used = 0
    for row in source.rows():
        given += 1
        if len(stream) >= max_tokens:
            continue
        where = f"{source.name}, row {given}"
        text = row if isinstance(row, str) else conversation_text(row, tokenizers[0], where)
        if not text.strip():
            continue
        stream += _agreed_ids(text + SEPARATOR, tokenizers, where)
        used += 1
    del stream[max_tokens:]
    front = [] if bos is None else [bos]
    ids = [front + stream[i : i + room] for i in range(0, len(stream), room)]
    windows = Windows([w for w in ids if len(w) > 1], bos, given, used, len(stream))
    if windows.positions < MIN_POSITIONS:
        raise ConfigError(
            f"too little text in {source.name}",
            have=f"{windows.tokens} tokens in {used} of {given} rows",
            need=f"at least {MIN_POSITIONS} predicted tokens",
        )
    return windows


def _agreed_ids(text: str, tokenizers: Sequence[Tokenizer], where: str) -> list[int]:
    try:
        ids, *others = (tokenizer.encode(text, add_special_tokens=False) for tokenizer in tokenizers)
    except RequestError as e:
        raise ConfigError(f"{where}: {e}") from e
    if any(other != ids for other in others):
        raise ConfigError(
            "the two models cut text into different tokens, so their predictions cannot be compared",
            have=f"{where} differs",
            need="models with one tokenizer",
        )
    return ids


def start_id(tokenizer: Tokenizer) -> int | None:
    """The BOS id where the tokenizer itself puts it before a text, else None."""
    if tokenizer.bos_id is None:
        return None
    ids = tokenizer.encode("a")
    return tokenizer.bos_id if ids[:1] == [tokenizer.bos_id] else None
