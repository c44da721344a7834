"""Which token ids end a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class HasEos(Protocol):
    @property
    def eos_id(self) -> int | None: ...


def eos_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, tokenizer: HasEos | None = None
) -> tuple[int, ...]:
    """The union of what config.json (also its `text_config`), generation_config.json and the tokenizer call end of
    sequence, sorted. Each file may hold an id, a list of ids or nothing; none of them overrides another."""
    found: set[int] = set()
    for source in (config, config.get("text_config") or {}, generation_config or {}):
        value = source.get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    if tokenizer is not None and tokenizer.eos_id is not None:
        found.add(tokenizer.eos_id)
    return tuple(sorted(found))
