"""Chat templates: where they come from, and rendering as transformers does it (sandboxed Jinja)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qengine.errors import CheckpointError, ConfigError, RequestError

RESERVED = frozenset(
    {
        "messages",
        "conversations",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
"""Names that `render` itself gives to a template or its renderer."""


class ChatTemplate:
    """The templates of one tokenizer. Rendering is pure, so threads may share one.

    `templates` holds "default" and perhaps others by name; "tool_use" is taken when tools are given.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_option(cls, value: str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """From what `--chat-template` gave: a file's path, or the template itself. Raises ConfigError, also for text
        that no template engine can read."""
        text = value
        if "{" not in value and "\n" not in value:
            try:
                text = Path(value).read_text(encoding="utf-8")
            except (OSError, ValueError) as e:
                raise ConfigError(
                    "--chat-template is neither a readable file nor a template",
                    have=repr(value),
                    hint=f"a path, or Jinja text with braces ({type(e).__name__})",
                ) from e
        made = cls({"default": text}, special_tokens)
        if (fault := made._syntax_fault()) is not None:
            raise ConfigError(f"--chat-template is not valid Jinja: {fault}", have=repr(value)[:80])
        return made

    def _syntax_fault(self) -> object:
        """What is wrong with the default template's syntax, or None. What it says to messages is its own business."""
        import jinja2

        try:
            self.render([{"role": "user", "content": "x"}])
        except RequestError as e:
            if isinstance(e.__cause__, jinja2.TemplateSyntaxError):
                return e.__cause__
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens spelled out. Raises RequestError with the template's own words when it
        refuses the messages. `variables` are further names that the template may read."""
        # Imported late: transformers takes a second, and prompts as text or ids never need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise RequestError(
                "the chat template has no default form",
                param="messages",
                have=sorted(self.templates),
                hint="serve with --chat-template FILE",
            )
        for reserved in sorted(RESERVED.intersection(variables or ())):
            raise RequestError(
                f"chat_template_kwargs cannot set {reserved}",
                param="chat_template_kwargs",
                hint="the request's own field of this name, where there is one",
            )
        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(m) for m in messages]],
                tools=[dict(t) for t in tools] if tools else None,
                chat_template=self.templates[name],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.special_tokens, **(variables or {})},
            )
        except Exception as e:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template refused the messages: {e}", param="messages") from e
        text: str = rendered[0][0]
        return text


def preload() -> None:
    """Import what `render` needs, so that the first conversation does not wait for it."""
    import transformers.utils.chat_template_utils  # noqa: F401


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name from chat_template.jinja, chat_template.json or tokenizer_config.json, in this order, with
    those of the folder additional_chat_templates/ added."""
    found: dict[str, str] = {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    if (path := folder / "chat_template.jinja").is_file():
        return {**found, "default": _read_text(path)}
    if (path := folder / "chat_template.json").is_file():
        try:
            value = json.loads(_read_text(path))
        except ValueError as e:
            raise CheckpointError(f"{path} is not JSON: {e}") from e
        return {**found, **_named(value.get("chat_template") if isinstance(value, dict) else None)}
    return {**found, **_named(config.get("chat_template"))}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}", hint="download it again") from e


def _named(value: Any) -> dict[str, str]:
    """tokenizer_config.json holds one template, a list of {name, template}, an object of them by name, or none."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {e["name"]: e["template"] for e in value} if isinstance(value, list) else dict(value)
    except (TypeError, KeyError, ValueError):
        named = {"": None}
    if not all(isinstance(text, str) for text in named.values()):
        raise CheckpointError("chat_template is neither a text nor texts by name", have=repr(value)[:80])
    return named
