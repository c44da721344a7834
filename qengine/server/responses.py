"""Answers in the shapes of the OpenAI API, as structs: fields that are UNSET are left out of the JSON, None is null."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token. `top_logprobs` is None at a token without alternatives; `text_offset` counts characters
    of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""vLLM's shape: for each token of the prompt the token itself and the likeliest others, by id; null for the first."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Whole answers carry `usage`; of the chunks of a stream only the last one does, if it was asked for."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice] = []
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "qengine"
    parent: None = None


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class HealthReport(msgspec.Struct, kw_only=True):
    status: Literal["ok", "unhealthy"]
    reason: str | None
    heartbeat_age_s: float
    progress_age_s: float
    num_requests_running: int
    num_requests_waiting: int


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strict JSON: msgspec writes a number that is not finite as null."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
