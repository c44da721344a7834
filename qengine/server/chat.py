"""POST /v1/chat/completions. Streamed and whole answers are made of the same deltas."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from qengine.errors import RequestError
from qengine.runtime.input_processor import ProcessedRequest
from qengine.runtime.results import Delta
from qengine.server.body import typed_body
from qengine.server.generation import Generation
from qengine.server.logprobs import asked_prompt_logprobs, chat_logprobs
from qengine.server.messages import message_dicts, template_options
from qengine.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    Usage,
    json_response,
)
from qengine.server.schemas import ChatRequest, refuse_unbuilt, sampling_fields
from qengine.server.state import ServerState, new_id
from qengine.server.streaming import EventStream, client_left, while_connected

ROLE = "assistant"


async def create(state: ServerState, request: Request) -> Response:
    arrival = time.monotonic()
    body = await typed_body(request, ChatRequest, state.config.max_body_bytes)
    model = state.check_model(body.model)
    state.check_template_allowed(body.chat_template)
    refuse_unbuilt(body)
    return await while_connected(request.receive, _respond(state, body, model, arrival)) or client_left()


async def _respond(state: ServerState, body: ChatRequest, model: str, arrival: float) -> Response:
    request_id = new_id("chatcmpl")
    prompt = await state.in_thread(_process, state, body, request_id)
    state.client.check_alive()
    answer = _Answer(body, model, request_id, Generation(state, [prompt], arrival))
    return EventStream(answer.chunks()) if body.stream else json_response(await answer.whole())


def _process(state: ServerState, body: ChatRequest, request_id: str) -> ProcessedRequest:
    fields = sampling_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.logprobs:
        top = body.top_logprobs or 0
        if not 0 <= top <= 20:
            raise RequestError("top_logprobs is out of range", param="top_logprobs", have=top, need="0..20")
        fields["logprobs"] = top
    limit = _limit(body)
    if limit is not None:
        fields["max_tokens"] = limit
    return state.input.process_chat(
        message_dicts(body.messages),
        state.input.default_params(**fields),
        request_id=request_id,
        priority=state.checked_priority(body.priority),
        cache_salt=body.cache_salt,
        shorten=limit is None,
        **template_options(body),
    )


def _limit(body: ChatRequest) -> int | None:
    """Tokens of the answer at most, under either of its names. Raises RequestError where the two differ."""
    old, new = body.max_tokens, body.max_completion_tokens
    for name, value in (("max_tokens", old), ("max_completion_tokens", new)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is out of range", param=name, have=value, need=">= 1")
    if old is not None and new is not None and old != new:
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit and differ", param="max_tokens",
            have=f"max_tokens {old}, max_completion_tokens {new}", need="one of them, or the same number",
        )  # fmt: skip
    return old if new is None else new


class _Answer:
    def __init__(self, body: ChatRequest, model: str, request_id: str, generation: Generation) -> None:
        self._body = body
        self._model = model
        self._id = request_id
        self._created = int(time.time())
        self._generation = generation

    async def whole(self) -> ChatCompletion:
        choices: dict[int, ChatChoice] = {}
        of_prompt: PromptLogprobs | UnsetType = UNSET
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                if index not in choices:
                    of_prompt = asked_prompt_logprobs(self._body, self._generation.result(delta))
                    choices[index] = ChatChoice(index=index, message=ChatMessage(role=ROLE, content=""))
                choice, logprobs = choices[index], self._logprobs(delta)
                choice.message.content += delta.text
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                if choice.logprobs is None:
                    choice.logprobs = logprobs
                elif logprobs is not None:
                    choice.logprobs.content += logprobs.content
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choices[i] for i in sorted(choices)],
            usage=self._generation.usage(),
            prompt_logprobs=of_prompt,
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        """The role once for each choice, then text as it comes; usage last, if asked for, with no choices."""
        with_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        usage = None if with_usage else UNSET
        begun: set[int] = set()
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                if index not in begun:
                    begun.add(index)
                    role = ChatChunkChoice(index=index, delta=ChatDelta(role=ROLE, content=""))
                    yield self._chunk([role], usage)
                choice = self._chunk_choice(index, delta)
                if delta.text or choice.logprobs or choice.finish_reason:
                    yield self._chunk([choice], usage)
        if with_usage:
            yield self._chunk([], self._generation.usage())

    def _chunk_choice(self, index: int, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not delta.logprobs:
            return None
        return ChatLogprobs(content=chat_logprobs(delta.logprobs, self._body.top_logprobs or 0))
