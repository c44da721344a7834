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
    report: list[str] = []
