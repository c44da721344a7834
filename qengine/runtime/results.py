"""What a finished or growing answer looks like, neutral between the server and `LLM`. Names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Raw log-softmax of one token. `rank`: 1 is the likeliest. `token_bytes` may be part of a character, which
    `decoded_token` then shows as U+FFFD."""

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen token first, then the likeliest others."""


@dataclass
class CompletionOutput:
    """One of the n choices. `finish_reason`: stop, length, abort, error, or None while it grows. `stop_reason`: the
    stop string or stop token id that ended it; None for end of sequence. `error` is set with finish_reason error."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestResult:
    """A request with all its choices. Usage: len(prompt_token_ids), the sum of len(outputs[i].token_ids), and
    num_cached_tokens of the prompt. `prompt_logprobs` has None at position 0."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False

    @property
    def num_output_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs)


@dataclass(slots=True)
class Delta:
    """What one step added to one choice. `text` may be empty while a character or a possible stop string is held
    back. `finished`: the whole request, all its choices, is complete with this."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    finished: bool = False
