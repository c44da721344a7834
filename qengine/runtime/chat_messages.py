"""Chat messages as the API allows them, made plain for a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qengine.errors import RequestError

_ROLE = re.compile(r"\w[\w.-]{0,63}")
"""Which roles there are is the template's business; text that could pass for template markup is none."""


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content as one string (text parts joined by line breaks); other fields as they are.

    Raises RequestError for no messages, a missing role, a missing content (of others than the assistant) and parts that
    are not text.
    """
    if not isinstance(messages, list | tuple):
        kind = type(messages).__name__
        raise RequestError("messages has the wrong type", param="messages", have=kind, need="a list of {role, content}")
    if not messages:
        raise RequestError("messages is empty", param="messages", need="a list of {role, content}")
    return [_flat_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _flat_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has no role", param="messages", have=repr(message)[:80], need="{role, content}")
    if not _ROLE.fullmatch(message["role"]):
        raise RequestError(
            f"{where}.role is no role", param="messages", have=repr(message["role"])[:80],
            need="a word such as system, user or assistant",
        )
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(part, where) for part in content)
    elif content is None and (message["role"] == "assistant" or message.get("tool_calls")):
        content = ""  # an answer that only calls tools
    elif content is None:
        raise RequestError(f"{where} has no content", param="messages", need="content: a text or a list of text parts")
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content has the wrong type",
            param="messages",
            have=type(content).__name__,
            need="a text or a list of text parts",
        )
    return {**message, "content": content, **_tool_calls(message)}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, Mapping) and part.get("type") == "text":
        have = type(part["text"]).__name__ if "text" in part else "none"
        message = f"{where} has a text part without a text"
        raise RequestError(message, param="messages", have=have, need="text: a string")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"{where} has a part that is not text", param="messages", have=repr(kind), need="type: text")


def _tool_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Tool calls with their arguments as objects: the API sends them as JSON text, templates expect objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return {}
    out = []
    for call in calls:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as e:
                raise RequestError("tool_calls: arguments are not JSON", param="messages", have=str(e)) from e
        out.append({**call, "function": function})
    return {"tool_calls": out}
