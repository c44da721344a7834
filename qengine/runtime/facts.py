"""What the front (tokenising, HTTP) must know about a running engine."""

from __future__ import annotations

import msgspec


class EngineFacts(msgspec.Struct, kw_only=True):
    """Sent once, when the engine is ready. `report` holds the start-up report's lines."""

    model_folder: str
    tokenizer_folder: str
    vocab_size: int
    max_model_len: int
    kv_tokens: int
    block_size: int
    model_context: int | None = None
    """What the model itself allows, where that is known."""
    report: list[str] = []
