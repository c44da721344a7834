"""The `prompt` of a completion request, decoded piece by piece.

A C decoder holds the interpreter's lock while it runs: millions of ids at once would keep /health waiting. So a
prompt arrives as raw JSON, its pieces are decoded one by one in a worker thread, and a list of ids that is longer
than the model's context is refused by its number of commas.
"""

from __future__ import annotations

import msgspec

from qengine.errors import RequestError
from qengine.runtime.input_processor import Prompt

_NEED = "a text, a list of token ids, a list of texts, or a list of lists of ids"


def decode_prompts(raw: msgspec.Raw, max_model_len: int) -> list[Prompt]:
    """Single prompts, each a text or ids. Raises RequestError."""
    data = bytes(raw).lstrip()
    try:
        if not _is_list(data):
            return [_one(data, max_model_len)]
        parts = msgspec.json.decode(data, type=list[msgspec.Raw])
        if not parts:
            raise RequestError("the prompt is empty", param="prompt", have="[]", need=_NEED)
        lists = [bytes(part).startswith(b"[") for part in parts]
        if any(lists) != all(lists):
            raise RequestError("prompt mixes texts and ids", param="prompt", need=_NEED)
        return [_one(bytes(part), max_model_len) for part in parts]
    except (msgspec.DecodeError, UnicodeDecodeError) as e:  # a raw value's strings have not been looked at before
        raise RequestError(f"the prompt cannot be read: {e}", param="prompt", need=_NEED) from None


def _is_list(data: bytes) -> bool:
    """Whether this is a list of prompts; a list of ids is one prompt."""
    return data.startswith(b"[") and data[1:100].lstrip()[:1] in (b'"', b"[", b"]")


def _one(data: bytes, max_model_len: int) -> Prompt:
    if not data.startswith(b"["):
        return msgspec.json.decode(data, type=str)
    count = data.count(b",") + 1
    if count >= max_model_len:
        raise RequestError(
            "the prompt is longer than the model's context",
            param="prompt",
            have=f"{count} tokens",
            need=f"at most {max_model_len - 1} tokens, so that one more fits into {max_model_len}",
        )
    return msgspec.json.decode(data, type=list[int])
