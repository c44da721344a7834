"""How a tokenizer's decoder spells one token as bytes, read from the decoder's own description.

Byte-level decoders (GPT-2, Llama 3, Qwen, SmolLM) and metaspace or byte-fallback ones (Llama 2, Mistral, Gemma) are
sums over tokens: each token is some bytes, whatever stands beside it, and only the start of the text is special.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in GPT-2's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    same = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in same}
    others = [b for b in range(256) if b not in set(same)]
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


@dataclass
class TokenPlan:
    """The text of ids is the joined bytes of their tokens, read as UTF-8, apart from its start.

    `replace`: (old, new) in each token's text. `byte_level`, `byte_fallback`: how token text becomes bytes.
    `drop_in_first`: this character vanishes from the first token. `strip`: up to `strip_count` of this byte string
    vanish from the start of the text. `separator`: stands between tokens.
    """

    replace: list[tuple[str, str]] = field(default_factory=list)
    byte_level: bool = False
    byte_fallback: bool = False
    drop_in_first: str = ""
    strip: bytes = b" "
    strip_count: int = 0
    separator: bytes = b""
    texts: dict[bool, dict[int, str]] = field(default_factory=lambda: {False: {}, True: {}}, compare=False)
    """The text of tokens that spell whole characters wherever they stand, found as they come; True: without special
    ones."""

    def spell(self, token: str, first: bool = False) -> bytes:
        """Bytes of one token; `first`: it opens the text."""
        if first and self.drop_in_first:
            token = token.replace(self.drop_in_first, "")
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.byte_fallback and (m := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(m[1], 16)])
        if self.byte_level and all(c in _ALPHABET for c in token):
            return bytes(_ALPHABET[c] for c in token)
        return token.encode("utf-8", errors="replace")


def plan_tokens(decoder: Mapping[str, Any] | None) -> TokenPlan | None:
    """The plan of a decoder as tokenizer.json describes it, or None where text is not a sum over tokens."""
    if decoder is None:
        return TokenPlan(separator=b" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    plan = TokenPlan()
    fused = False
    for step in steps:
        # What follows a byte step or Fuse would see merged tokens: only a final Strip is still simple.
        closed = fused or plan.byte_fallback or plan.byte_level
        if step["type"] == "Fuse":
            fused = True
        elif step["type"] == "Strip":
            if not fused or step["stop"] or len(step["content"].encode()) != 1:
                return None
            plan.strip, plan.strip_count = step["content"].encode(), step["start"]
        elif closed or not (add := _STEPS.get(step["type"])) or not add(plan, step):
            return None
    return plan


def _add_replace(plan: TokenPlan, step: Mapping[str, Any]) -> bool:
    if "String" not in step["pattern"]:
        return False
    plan.replace.append((step["pattern"]["String"], step["content"]))
    return True


def _add_metaspace(plan: TokenPlan, step: Mapping[str, Any]) -> bool:
    if plan.replace:
        return False
    plan.replace.append((step["replacement"], " "))
    if step.get("prepend_scheme", "always") != "never":
        plan.drop_in_first = step["replacement"]
    return True


def _add_byte_level(plan: TokenPlan, step: Mapping[str, Any]) -> bool:
    plan.byte_level = True
    return True


def _add_byte_fallback(plan: TokenPlan, step: Mapping[str, Any]) -> bool:
    plan.byte_fallback = True
    return True


_STEPS: dict[str, Callable[[TokenPlan, Mapping[str, Any]], bool]] = {
    "Replace": _add_replace,
    "Metaspace": _add_metaspace,
    "ByteLevel": _add_byte_level,
    "ByteFallback": _add_byte_fallback,
}
