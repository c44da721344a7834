"""Request bodies: every field that an endpoint knows, with its JSON type. Unknown fields are refused.

Three kinds of fields: those with a meaning here; those that the official client sends for the provider's own
purposes (`user`, `metadata`, ...), which change no output and are accepted; and those whose meaning is not built,
which are declared so that `refuse_unbuilt` can name them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from qengine.errors import RequestError


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share. None means the default, as in the OpenAI API."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None

    # sampling fields beyond the OpenAI API, with vLLM's names
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # accepted, without a meaning here: the provider's bookkeeping
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    # not built: refused by name unless they ask for nothing
    best_of: int | None = None
    use_beam_search: Any = None
    length_penalty: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: text, ids, a list of texts, or a list of lists of ids; see `prompts`."""

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One chat message. The fields after `name` come back when a client returns an assistant message as it got it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Any = None
    reasoning_content: str | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
}
"""Values beside null with which a field that is not built may be sent."""

NOT_BUILT = (
    "use_beam_search",
    "length_penalty",
    "response_format",
    "structured_outputs",
    "truncate_prompt_tokens",
    "suffix",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "tool_calls",
    "tool_call_id",
)


def refuse_unbuilt(body: msgspec.Struct, where: str = "") -> None:
    """Raise RequestError for the first field of `body` that asks for something that is not built."""
    for name in NOT_BUILT:
        value = getattr(body, name, None)
        if value is not None and value not in ASKS_FOR_NOTHING.get(name, ()):
            raise RequestError(f"{name} is not supported", param=where + name, hint=f"leave {name} out")


MAX_TEXTS, MAX_TEXT_CHARACTERS = 1024, 65536
"""Most stop strings or bad words of one request, and their characters in all."""

_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")

_COPIED = (
    "n",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def sampling_fields(body: GenerationRequest) -> dict[str, Any]:
    """The body's sampling fields under the names of SamplingParams, only those that were given. Raises RequestError
    for what the two endpoints refuse alike; ranges are SamplingParams' own."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        hint, param = "leave stream out; completions stream them with echo and logprobs", "prompt_logprobs"
        raise RequestError("prompt_logprobs needs a whole answer", param=param, have="stream: true", hint=hint)
    given = {name: getattr(body, name) for name in _COPIED if getattr(body, name) is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    for name in ("stop", "bad_words"):
        _check_size(name, given.get(name, []))
    if body.best_of is not None and body.best_of != given.get("n", 1):
        raise RequestError("best_of is not supported", param="best_of", have=body.best_of, need="n, or left out")
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    return given


def _check_size(name: str, texts: list[str]) -> None:
    """Every text costs work at each token: thousands of them are an attack or a mistake."""
    size = sum(map(len, texts))
    if len(texts) > MAX_TEXTS or size > MAX_TEXT_CHARACTERS:
        have, need = f"{len(texts)} with {size} characters", f"at most {MAX_TEXTS} with {MAX_TEXT_CHARACTERS} in all"
        raise RequestError(f"{name} holds too much", param=name, have=have, need=need)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    out: dict[int, float] = {}
    for token, value in bias.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) in out:  # "7" and "07" are one id with two values
            raise RequestError("logit_bias keys are token ids, each once", param="logit_bias", have=repr(token)[:80])
        out[int(token)] = value
    return out
