"""What sampling means, slowly: one row at a time, float64, plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from qengine.core.request import Request
from qengine.runtime.random_streams import uniforms
from qengine.sampling_params import SamplingParams


def make_request(
    name: str = "r", prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **sampling: Any
) -> Request:
    fields = {k: sampling.pop(k) for k in ("eos_token_ids", "bad_words_token_ids") if k in sampling}
    p = SamplingParams(**sampling)
    p.bad_words_token_ids = fields.get("bad_words_token_ids", [])
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        max_tokens=100,
        eos_token_ids=frozenset(fields.get("eos_token_ids", ())),
        stop_token_ids=frozenset(p.stop_token_ids),
        ignore_eos=p.ignore_eos,
        min_tokens=p.min_tokens,
        sampling=p,
        output_token_ids=list(output),
    )


def uniform(stream: int, position: int) -> float:
    return float(uniforms(np.array([stream], dtype=np.uint64), np.array([position], dtype=np.uint64))[0])


def edited(logits: Sequence[float], r: Request) -> list[float]:
    """logit_bias, bad words, min_tokens, penalties, in this order."""
    p: SamplingParams = r.sampling
    x = [v + p.logit_bias.get(i, 0.0) for i, v in enumerate(logits)]
    for word in p.bad_words_token_ids:
        if word[:-1] == r.output_token_ids[len(r.output_token_ids) - len(word) + 1 :]:
            x[word[-1]] = -math.inf
    if len(r.output_token_ids) < p.min_tokens:
        for i in p.stop_token_ids + ([] if p.ignore_eos else list(r.eos_token_ids)):
            x[i] = -math.inf
    for i in set(r.prompt_token_ids + r.output_token_ids):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in Counter(r.output_token_ids).items():
        x[i] -= p.frequency_penalty * count + p.presence_penalty
    return x


def distribution(logits: Sequence[float], r: Request) -> list[float]:
    """Probability of each token: edits, temperature, min_p, top_k, top_p (of what is left, renormalised)."""
    p: SamplingParams = r.sampling
    x = edited(logits, r)
    if p.greedy:
        best = x.index(max(x))
        return [float(i == best) for i in range(len(x))]
    x = [v / p.temperature for v in x]
    top = max(x)
    weight = [math.exp(v - top) for v in x]
    weight = [w if w >= p.min_p else 0.0 for w in weight]
    if p.top_k > 0:
        least = sorted(weight, reverse=True)[min(p.top_k, len(x)) - 1]
        weight = [w if w >= least else 0.0 for w in weight]
    total = sum(weight)
    if p.top_p < 1:
        above, least = 0.0, 0.0
        for w in sorted(weight, reverse=True):
            if above and above >= p.top_p * total:
                break
            least, above = w, above + w
        weight = [w if w >= least else 0.0 for w in weight]
    total = sum(weight)
    return [w / total for w in weight]


def token_at(probabilities: Sequence[float], u: float) -> tuple[int, float]:
    """(first token whose running sum exceeds u, distance of u to the nearest step)."""
    running, token, distance = 0.0, None, 1.0
    for i, q in enumerate(probabilities):
        running += q
        if q:
            distance = min(distance, abs(running - u))
        if token is None and running > u:
            token = i
    return (len(probabilities) - 1 if token is None else token), distance
