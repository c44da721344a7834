"""Calibration text: the built-in set or a user's file, tokenised, split and packed into sequences of equal length."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from qengine.errors import ConfigError, RequestError
from qengine.runtime.chat_messages import flatten_messages
from qengine.text.tokenizer import Tokenizer
from qengine_calibration.data_files import NEED, require_parquet

BUILT_IN = ("english.txt", "code.txt", "multilingual.txt")
BREAK = "\n---\n"
"""Separates the rows of the built-in set and of a .txt file."""
LENGTH = 512
"""Tokens of a sequence, where the model's context is as long."""
LEAST_TOKENS = 256
"""Fewer tell nothing about what a model's activations look like."""
TEXT_KEYS = ("text", "content", "prompt")
CHAT_KEYS = ("messages", "conversations")
_MORE = "more text, or no --data for the built-in texts"

Row = str | list[dict[str, Any]]
"""A text, or the messages of a conversation."""


@dataclass(frozen=True)
class Texts:
    """Token ids in sequences of at most `length`; only the last may be shorter. `digest` names the ids: the same
    digest means the same calibration."""

    sequences: list[list[int]]
    length: int
    source: str
    rows_given: int
    rows_used: int
    digest: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def describe(self) -> str:
        return (
            f"{self.tokens:,} tokens in {len(self.sequences)} sequences of {self.length} from {self.source} "
            f"({self.rows_used} of {self.rows_given} rows used)"
        )

    def facts(self) -> dict[str, Any]:
        """For reports: everything but the ids."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sequences"}
        return out | {"num_sequences": len(self.sequences), "tokens": self.tokens}


def load_texts(
    data: str | Path | None, tokenizer: Tokenizer, *, length: int = LENGTH, samples: int | None = None,
    least_tokens: int = LEAST_TOKENS, field: str | None = None, name: str | None = None,
) -> Texts:
    """`data` is a .txt, .jsonl or .parquet file, None the built-in set; `samples` the most sequences that are taken.
    `field` names the field of a row that holds its text, `name` the data in reports.

    Rows are packed one after the other and cut every `length` tokens, so long ones are split and none is padded.
    Blank rows are not used. Raises ConfigError for a file that cannot be read or holds fewer than `least_tokens`.
    """
    if data is None:
        refuse_field(field, "the built-in texts")
    if samples is not None and samples * length < least_tokens:
        raise ConfigError(
            f"--samples of {length} tokens are too little text to calibrate with", have=samples,
            need=f">= {-(-least_tokens // length)}",
        )  # fmt: skip
    rows = built_in_rows() if data is None else read_rows(Path(data), field)
    source = "the built-in texts" if data is None else name or str(data)
    limit = None if samples is None else samples * length
    ids: list[int] = []
    given = used = 0
    for row in rows:
        given += 1
        if limit is not None and len(ids) >= limit:
            continue
        own = _encode(row, tokenizer, f"{source}, row {given}")
        used += bool(own)
        ids += own
    ids = ids[:limit]
    if len(ids) < least_tokens:
        raise ConfigError(
            f"{source}: too little text to calibrate with", have=f"{len(ids)} tokens in {used} of {given} rows",
            need=f"at least {least_tokens} tokens", hint=_MORE if used else f"{_MORE}, or --data-field NAME",
        )  # fmt: skip
    digest = hashlib.sha256(json.dumps([length, ids]).encode()).hexdigest()
    sequences = [ids[i : i + length] for i in range(0, len(ids), length)]
    return Texts(sequences, length, source, given, used, digest)


def refuse_field(field: str | None, built_in: str) -> None:
    """Raise ConfigError where a field of --data's rows is named and there is no --data."""
    if field is not None:
        raise ConfigError(
            "--data-field names a field of --data's rows", have=f"{field!r} for {built_in}", need="--data FILE"
        )


def built_in_rows() -> Iterator[Row]:
    folder = resources.files("qengine_calibration") / "data"
    for name in BUILT_IN:
        yield from (folder / name).read_text(encoding="utf-8").split(BREAK)


def read_rows(path: Path, field: str | None = None) -> Iterator[Row]:
    """`field`: the one field of a .jsonl or .parquet row that holds its text, else the usual names are tried."""
    readers: dict[str, Callable[[Path, str | None], Iterator[Row]]] = {
        ".txt": _text_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows,
    }  # fmt: skip
    if path.suffix not in readers:
        raise ConfigError("--data", have=path.name, need=NEED)
    try:
        yield from readers[path.suffix](path, field)
    except OSError as e:
        raise ConfigError(f"--data {path} cannot be read: {e}") from e


def _text_rows(path: Path, field: str | None) -> Iterator[Row]:
    if field is not None:
        raise ConfigError("--data-field is for .jsonl and .parquet files", have=path.name)
    text = _decoded(path.read_bytes(), path.name)
    yield from text.replace("\r\n", "\n").replace("\r", "\n").split(BREAK)


def _jsonl_rows(path: Path, field: str | None) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path.name}, line {number}"
            text = _decoded(line, where)
            if not text.strip():
                yield ""
                continue
            try:
                value = json.loads(text)
            except ValueError as e:
                raise ConfigError(f"{where} is not JSON: {e}") from e
            yield _row(value, where, field)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"{where} is not UTF-8", have=f"byte 0x{data[e.start]:02x} at offset {e.start:,}", need="text in UTF-8",
            hint="a file in another encoding is converted by iconv -f ENCODING -t UTF-8",
        ) from e  # fmt: skip


def _parquet_rows(path: Path, field: str | None) -> Iterator[Row]:
    require_parquet()
    parquet = importlib.import_module("pyarrow.parquet")
    wrong: type[Exception] = importlib.import_module("pyarrow").ArrowInvalid
    try:
        file = parquet.ParquetFile(path)
    except wrong as e:
        raise ConfigError(f"--data {path.name} is no parquet file: {e}") from e
    keys = (field,) if field is not None else (*CHAT_KEYS, *TEXT_KEYS)
    wanted = [name for name in file.schema_arrow.names if name in keys]
    number = 0
    for batch in file.iter_batches(batch_size=64, columns=wanted or None):
        for value in batch.to_pylist():
            number += 1
            yield _row(value, f"{path.name}, row {number}", field)


def _row(value: Any, where: str, field: str | None) -> Row:
    """A JSON string, a list of messages, or an object that holds one of both under `field` or a usual name; where it
    says null, the row is blank."""
    if isinstance(value, dict):
        keys = (field,) if field is not None else (*CHAT_KEYS, *TEXT_KEYS)
        if not any(k in value for k in keys):
            raise ConfigError(
                f"{where} has no text", have=", ".join(map(str, value)) or "no fields", need=" | ".join(keys),
                hint="--data-field NAME" if field is None else None,
            )  # fmt: skip
        value = next((value[k] for k in keys if value.get(k) is not None), "")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):
        return [_message(m) for m in value]
    raise ConfigError(f"{where} is neither a text nor a list of messages", have=repr(value)[:60])


def _message(m: dict[str, Any]) -> dict[str, Any]:
    """ShareGPT's from/value as role/content."""
    if "from" in m and "value" in m:
        roles = {"human": "user", "gpt": "assistant"}
        return {"role": roles.get(m["from"], m["from"]), "content": m["value"]}
    return m


def _encode(row: Row, tokenizer: Tokenizer, where: str) -> Sequence[int]:
    """Ids of one row with the special tokens that the model sees; none for a blank one."""
    text = row if isinstance(row, str) else conversation_text(row, tokenizer, where)
    if not text.strip():
        return []
    try:
        return tokenizer.encode(text.strip("\n")) if row is text else tokenizer.encode(text, add_special_tokens=False)
    except RequestError as e:
        raise ConfigError(f"{where}: {e}") from e


def conversation_text(messages: list[dict[str, Any]], tokenizer: Tokenizer, where: str) -> str:
    """Messages as the chat template writes them; nothing for none. Raises ConfigError, with `where` in front, for what
    the template does not take."""
    if not messages:
        return ""
    try:
        return tokenizer.apply_chat_template(flatten_messages(messages), add_generation_prompt=False)
    except RequestError as e:
        raise ConfigError(f"{where}: {e}") from e
