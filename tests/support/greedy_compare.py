"""Compares greedy runs of two engines: they may part only where the reference itself is undecided."""

from __future__ import annotations

from collections.abc import Sequence

from qengine.messages import TokenLogprobs
from qengine.runtime.engine import Engine
from toy_engine import Run, request, run


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[TokenLogprobs]]:
    """Greedy continuations with the two likeliest tokens of every position."""
    requests = [
        request(str(i), p, max_tokens=max_tokens, logprobs=2, ignore_eos=True) for i, p in enumerate(prompts)
    ]
    done: Run = run(engine, requests)
    found: list[list[TokenLogprobs]] = [[] for _ in prompts]
    for out in done.outputs:
        found[int(out.request_id)] += out.logprobs or []
    return found


def forced(
    engine: Engine, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[TokenLogprobs]]
) -> list[list[TokenLogprobs]]:
    """What an engine makes of continuations that it is given: its two likeliest tokens at every position of `texts`."""
    asked = [
        request(f"forced-{i}", [*prompt, *(t.token_id for t in text)], max_tokens=1, prompt_logprobs=2)
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    last = run(engine, asked).last
    found = [last[r.request_id].prompt_logprobs or [] for r in asked]
    return [[t for t in own[len(p) :] if t is not None] for p, own in zip(prompts, found, strict=True)]


def first_clear_difference(
    reference: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs], margin: float
) -> str | None:
    """None when the ids agree up to a place where the reference's two likeliest tokens lie within `margin` (natural
    log); else what differs and where. After the first difference the texts are other texts."""
    for i, (a, b) in enumerate(zip(reference, other, strict=True)):
        gap = a.top_logprobs[0] - a.top_logprobs[1]
        if a.token_id != b.token_id:
            return f"position {i}: {a.token_id} and {b.token_id}, margin {gap:.3f}" if gap > margin else None
    return None
