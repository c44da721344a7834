"""SamplingParams: how one request is sampled. Names, defaults and meaning follow vLLM and the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from qengine.errors import RequestError


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling options of one request.

    temperature 0 means greedy. `top_k` 0 or -1 means all tokens. `logprobs` asks for that many alternatives beside
    the chosen token; values are raw log-softmax of the logits, before penalties, masks and temperature.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    bad_words_token_ids: list[list[int]] = []
    """Filled by the input processor from `bad_words`."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in COLLECTIONS:  # None means nothing, as in vLLM
            if getattr(self, name) is None:
                setattr(self, name, {} if name == "logit_bias" else [])
        check_sampling(self)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


COLLECTIONS = ("stop", "stop_token_ids", "bad_words", "logit_bias")


def _finite(value: Any) -> bool:
    """Not math.isfinite, which raises for integers beyond the floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _number(p: SamplingParams, name: str, low: float, high: float, need: str) -> None:
    value: Any = getattr(p, name)
    if not _finite(value):
        raise RequestError(f"{name} must be a finite number", param=name, have=repr(value)[:80], need=need)
    if not low <= value <= high:
        raise RequestError(f"{name} is out of range", param=name, have=value, need=need)


def _strings(values: Any, name: str) -> None:
    if not isinstance(values, list | tuple):
        raise RequestError(f"{name} takes a list of strings", param=name, have=repr(values)[:80])
    for s in values:
        if not isinstance(s, str) or not s:
            raise RequestError(f"{name} takes non-empty strings", param=name, have=repr(s))


def check_sampling(p: SamplingParams) -> None:
    """Raise RequestError for the first field that is out of range. Vocabulary limits are the input processor's."""
    big = float(2**31)
    _number(p, "n", 1, 128, "1..128")
    _number(p, "temperature", 0, 100, "0..100")
    _number(p, "top_p", 0, 1, "0..1")
    _number(p, "top_k", -1, big, "-1 or 0 (all), or 1..2**31")
    _number(p, "min_p", 0, 1, "0..1")
    _number(p, "presence_penalty", -2, 2, "-2..2")
    _number(p, "frequency_penalty", -2, 2, "-2..2")
    _number(p, "repetition_penalty", 1e-6, 1e6, "1e-6..1e6")
    _number(p, "min_tokens", 0, big, "0..2**31")
    if p.max_tokens is not None:
        _number(p, "max_tokens", 1, big, "1..2**31")
        if p.min_tokens > p.max_tokens:
            raise RequestError(
                "min_tokens is above max_tokens", param="min_tokens", have=p.min_tokens, need=f"<= {p.max_tokens}"
            )
    if p.seed is not None:
        _number(p, "seed", -(2**63), 2**64 - 1, "a 64-bit integer")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(p, name) is not None:
            _number(p, name, 0, 20, "0..20")
    _strings(p.stop, "stop")
    _strings(p.bad_words, "bad_words")
    if not isinstance(p.logit_bias, Mapping):
        raise RequestError("logit_bias maps token ids to numbers", param="logit_bias", have=repr(p.logit_bias)[:80])
    for token, bias in p.logit_bias.items():
        if not _finite(bias) or not -100 <= bias <= 100:
            raise RequestError("logit_bias values must lie in -100..100", param="logit_bias", have={token: bias})
