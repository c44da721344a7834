"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from qengine.errors import RequestError
from qengine.server.body import typed_body
from qengine.server.logprobs import token_name
from qengine.server.messages import message_dicts, template_options
from qengine.server.responses import Detokenized, Tokenized, json_response
from qengine.server.schemas import DetokenizeRequest, TokenizeRequest
from qengine.server.state import ServerState

NOTHING = TokenizeRequest()
"""Every field as it is where a body does not name it."""


async def tokenize(state: ServerState, request: Request) -> Response:
    body = await typed_body(request, TokenizeRequest, state.config.max_body_bytes)
    state.check_model(body.model)
    state.check_template_allowed(body.chat_template)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    _refuse_chat_fields(body)
    return json_response(await state.in_thread(_tokenize, state, body))


def _refuse_chat_fields(body: TokenizeRequest) -> None:
    """Raises RequestError where a text comes with what only the messages of a chat have."""
    if body.messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"):
            if getattr(body, name) != getattr(NOTHING, name):
                raise RequestError(f"{name} is for messages", param=name, have="prompt", hint=f"leave {name} out")


def _tokenize(state: ServerState, body: TokenizeRequest) -> Tokenized:
    if body.messages is not None:
        text = state.input.chat_text(message_dicts(body.messages), **template_options(body))
        ids = state.input.encode(text, add_special_tokens=False)
    else:
        ids = state.input.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    names = [token_name(state.tokenizer.token_bytes(i)) for i in ids] if body.return_token_strs else None
    limit = state.client.facts.max_model_len
    return Tokenized(count=len(ids), max_model_len=limit, tokens=ids, token_strs=names)


async def detokenize(state: ServerState, request: Request) -> Response:
    body = await typed_body(request, DetokenizeRequest, state.config.max_body_bytes)
    state.check_model(body.model)
    return json_response(await state.in_thread(_detokenize, state, body.tokens))


def _detokenize(state: ServerState, token_ids: list[int]) -> Detokenized:
    ids = state.input.check_ids(token_ids, "tokens")
    return Detokenized(prompt=state.tokenizer.decode(ids, skip_special_tokens=False))
