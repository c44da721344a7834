"""Chat messages and template options of a body, as the input processor takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from qengine.errors import RequestError
from qengine.server.schemas import ChatRequest, Message, TokenizeRequest, refuse_unbuilt


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates see them: without fields that were not sent, content always there. Raises RequestError
    for a field that is not built, and for a message that says nothing."""
    out = []
    for i, message in enumerate(messages):
        refuse_unbuilt(message, where=f"messages[{i}].")
        if message.content is None:
            raise RequestError("a message needs content", param=f"messages[{i}].content", need="a text")
        out.append({k: v for k, v in msgspec.structs.asdict(message).items() if v is not None})
    return out


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Keywords of InputProcessor.chat_text and process_chat."""
    return {
        "chat_template": body.chat_template,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "template_variables": body.chat_template_kwargs,
    }
