"""Chat templates: where they come from, and rendering as transformers does it (sandboxed Jinja)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qengine.errors import CheckpointError, ConfigError, RequestError


class ChatTemplate:
    """The templates of one tokenizer. Rendering is pure, so threads may share one.

    `templates` holds "default" and perhaps others by name; "tool_use" is taken when tools are given.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_option(cls, value: str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """From what `--chat-template` gave: a file's path, or the template itself. Raises ConfigError."""
        if "{" in value or "\n" in value:
            return cls({"default": value}, special_tokens)
        try:
            return cls({"default": Path(value).read_text(encoding="utf-8")}, special_tokens)
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                "--chat-template is neither a readable file nor a template",
                have=repr(value),
                hint=f"a path, or Jinja text with braces ({type(e).__name__})",
            ) from e

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
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise RequestError(
                "the chat template has no default form",
                param="messages",
                have=sorted(self.templates),
                hint="serve with --chat-template FILE",
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
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
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
        found[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        return {**found, "default": path.read_text(encoding="utf-8")}
    if (path := folder / "chat_template.json").is_file():
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise CheckpointError(f"{path} is not JSON: {e}") from e
        return {**found, **_named(value.get("chat_template") if isinstance(value, dict) else None)}
    return {**found, **_named(config.get("chat_template"))}


def _named(value: Any) -> dict[str, str]:
    """tokenizer_config.json holds one template, a list of {name, template}, or none."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return dict(value) if isinstance(value, dict) else {}
