"""Which token ids end a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from qengine.errors import CheckpointError


class HasEos(Protocol):
    @property
    def eos_id(self) -> int | None: ...


def eos_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, tokenizer: HasEos | None = None
) -> tuple[int, ...]:
    """The union of what config.json (also its `text_config`), generation_config.json and the tokenizer call end of
    sequence, sorted. Each file may hold an id, a list of ids or nothing; none of them overrides another. Raises
    CheckpointError for anything else."""
    found: set[int] = set()
    text = config.get("text_config")
    for source in (config, text if isinstance(text, Mapping) else {}, generation_config or {}):
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list | tuple) else [value]
            if not all(type(i) is int for i in ids):
                raise CheckpointError("eos_token_id is wrong", have=repr(value)[:80], need="an id or a list of ids")
            found.update(ids)
    if tokenizer is not None and tokenizer.eos_id is not None:
        found.add(tokenizer.eos_id)
    return tuple(sorted(found))
