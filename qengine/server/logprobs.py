"""Logprobs in the two shapes of the OpenAI API. Values are raw log-softmax; one that is not finite is sent as null."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from qengine.runtime.results import Logprob, PositionLogprobs, RequestResult
from qengine.server.responses import ChatLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob
from qengine.server.schemas import GenerationRequest
from qengine.text import IncrementalDetokenizer, Tokenizer


def token_name(data: bytes) -> str:
    """A token's bytes as text; if they are not whole characters, as "bytes:\\x.." so that different tokens differ."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _top(position: PositionLogprobs, count: int) -> list[Logprob]:
    """The `count` likeliest, in order."""
    return sorted((p for p in position.values() if p.rank <= count), key=lambda p: p.rank)


def chat_logprobs(positions: Sequence[PositionLogprobs], top: int) -> list[ChatLogprob]:
    """One entry per token; `top`: how many alternatives were asked for."""
    content = []
    for position in positions:
        chosen = next(iter(position.values()))
        alternatives = [
            TopLogprob(token=token_name(p.token_bytes), logprob=finite(p.logprob), bytes=list(p.token_bytes))
            for p in _top(position, top)
        ]
        content.append(
            ChatLogprob(
                token=token_name(chosen.token_bytes),
                logprob=finite(chosen.logprob),
                bytes=list(chosen.token_bytes),
                top_logprobs=alternatives,
            )
        )
    return content


def asked_prompt_logprobs(body: GenerationRequest, result: RequestResult) -> PromptLogprobs | UnsetType:
    """What the body's `prompt_logprobs` asks for. Echoed logprobs may have made the engine give more."""
    top = body.prompt_logprobs
    if top is None:
        return UNSET
    assert result.prompt_logprobs is not None, "asked for, and they come with the first token"
    return [_with_alternatives(position, top) if position else None for position in result.prompt_logprobs]


def _with_alternatives(position: PositionLogprobs, top: int) -> dict[int, PromptLogprob]:
    chosen = next(iter(position))
    return {
        token_id: PromptLogprob(logprob=finite(p.logprob), rank=p.rank, decoded_token=p.decoded_token)
        for token_id, p in position.items()
        if token_id == chosen or p.rank <= top
    }


class CompletionLogprobsWriter:
    """The completions shape for one choice, piece by piece; it keeps the text offset, counted in characters."""

    def __init__(self, tokenizer: Tokenizer, top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens)

    def write(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], out: CompletionLogprobs
    ) -> None:
        """Append one entry per id to `out`; None (the first token of a prompt) has no logprob."""
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = position[token_id] if position else None
            out.tokens.append(token_name(self._tokenizer.token_bytes(token_id)))
            out.token_logprobs.append(finite(chosen.logprob) if chosen else None)
            out.top_logprobs.append(self._alternatives(position, chosen) if position and chosen else None)
            out.text_offset.append(self._offset)
            self._offset += len(self._text.push([token_id]))

    def _alternatives(self, position: PositionLogprobs, chosen: Logprob) -> dict[str, float | None]:
        """The likeliest tokens, and the chosen one in any case."""
        named = {token_name(p.token_bytes): finite(p.logprob) for p in _top(position, self._top)}
        named.setdefault(token_name(chosen.token_bytes), finite(chosen.logprob))
        return named
