"""POST /v1/completions. Streamed and whole answers are made of the same pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from qengine.errors import RequestError
from qengine.runtime.input_processor import ProcessedRequest
from qengine.runtime.results import Delta
from qengine.server.body import typed_body
from qengine.server.generation import Generation
from qengine.server.logprobs import CompletionLogprobsWriter, asked_prompt_logprobs
from qengine.server.prompts import decode_prompts
from qengine.server.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
    json_response,
)
from qengine.server.schemas import CompletionRequest, refuse_unbuilt, sampling_fields
from qengine.server.state import ServerState, new_id
from qengine.server.streaming import EventStream, client_left, while_connected

DEFAULT_MAX_TOKENS = 16
"""The OpenAI API's default of this endpoint."""
MAX_CHOICES = 4096
"""Most sequences that one request may start."""


async def create(state: ServerState, request: Request) -> Response:
    arrival = time.monotonic()
    body = await typed_body(request, CompletionRequest, state.config.max_body_bytes)
    model = state.check_model(body.model)
    refuse_unbuilt(body)
    return await while_connected(request.receive, _respond(state, body, model, arrival)) or client_left()


async def _respond(state: ServerState, body: CompletionRequest, model: str, arrival: float) -> Response:
    request_id = new_id("cmpl")
    prompts = await state.in_thread(_process, state, body, request_id)
    state.client.check_alive()
    answer = _Answer(state, body, prompts, Completion(id=request_id, created=int(time.time()), model=model), arrival)
    return EventStream(answer.chunks()) if body.stream else json_response(await answer.whole())


def _process(state: ServerState, body: CompletionRequest, request_id: str) -> list[ProcessedRequest]:
    """The body's prompts as checked requests."""
    prompts = decode_prompts(body.prompt, state.client.facts.max_model_len)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    fields = sampling_fields(body)
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the engine's least; `_Answer` does not show it
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = state.input.default_params(**fields, max_tokens=max_tokens)
    if len(prompts) * params.n > MAX_CHOICES:
        have = f"{len(prompts)} prompts with n = {params.n}"
        raise RequestError("too many choices in one request", param="prompt", have=have, need=f"<= {MAX_CHOICES}")
    return [
        state.input.process(
            prompt,
            params,
            request_id=f"{request_id}-p{i}",
            add_special_tokens=body.add_special_tokens is not False,
            priority=state.checked_priority(body.priority),
            cache_salt=body.cache_salt,
            shorten=body.max_tokens is None,
        )
        for i, prompt in enumerate(prompts)
    ]


class _Answer:
    """One answer; `frame` is its id, time and model, without choices."""

    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        prompts: Sequence[ProcessedRequest],
        frame: Completion,
        arrival: float,
    ) -> None:
        self._tokenizer = state.tokenizer
        self._body = body
        self._frame = frame
        self._generation = Generation(state, prompts, arrival)
        self._skip_special = body.skip_special_tokens is not False
        self._prompt_only = body.max_tokens == 0
        self._begun: set[int] = set()
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    async def whole(self) -> Completion:
        choices: dict[int, CompletionChoice] = {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                known = choices.setdefault(piece.index, piece)
                if known is not piece:
                    _join(known, piece)
        return self._with([choices[i] for i in sorted(choices)], self._usage())

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        with_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        usage = None if with_usage else UNSET
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if piece.text or piece.logprobs or piece.finish_reason:
                    yield self._with([piece], usage)
        if with_usage:
            yield self._with([], self._usage())

    def _with(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        f = self._frame
        return Completion(id=f.id, created=f.created, model=f.model, choices=choices, usage=usage)

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        if self._prompt_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    async def _pieces(self) -> AsyncGenerator[CompletionChoice, None]:
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                yield self._piece(index, delta)

    def _piece(self, index: int, delta: Delta) -> CompletionChoice:
        """What a delta adds to its choice; the first one brings the echoed prompt."""
        text, logprobs = "", self._logprobs_begin(index)
        of_prompt: PromptLogprobs | UnsetType = UNSET
        if index not in self._begun:
            self._begun.add(index)
            text = self._echo(index, delta, logprobs)
            of_prompt = asked_prompt_logprobs(self._body, self._generation.result(delta))
        if not self._prompt_only:
            text += delta.text
            if logprobs is not None and delta.logprobs:
                self._writers[index].write(delta.token_ids, delta.logprobs, logprobs)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs if logprobs is not None and logprobs.tokens else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_logprobs=of_prompt,
        )

    def _logprobs_begin(self, index: int) -> CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None:
            return None
        if index not in self._writers:
            self._writers[index] = CompletionLogprobsWriter(self._tokenizer, top, self._skip_special)
        return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])

    def _echo(self, index: int, delta: Delta, logprobs: CompletionLogprobs | None) -> str:
        """The prompt's text, its logprobs appended to `logprobs`; nothing without `echo`."""
        if not self._body.echo:
            return ""
        result = self._generation.result(delta)
        ids = result.prompt_token_ids
        if logprobs is not None:
            assert result.prompt_logprobs is not None, "asked for, and they come with the first token"
            self._writers[index].write(ids, result.prompt_logprobs, logprobs)
        return self._tokenizer.decode(ids, self._skip_special) if result.prompt is None else result.prompt


def _join(whole: CompletionChoice, piece: CompletionChoice) -> None:
    """Append a later piece of the same choice."""
    whole.text += piece.text
    whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.logprobs is None:
        return
    if whole.logprobs is None:
        whole.logprobs = piece.logprobs
        return
    whole.logprobs.tokens += piece.logprobs.tokens
    whole.logprobs.token_logprobs += piece.logprobs.token_logprobs
    whole.logprobs.top_logprobs += piece.logprobs.top_logprobs
    whole.logprobs.text_offset += piece.logprobs.text_offset
