"""Logits of every position of a given sequence, computed as a prompt is in serving.

The engine's own scheduler cuts the sequence into chunks, its runner writes each chunk's K/V into the paged cache and
reads them back, with the kernels and the KV dtype that requests get. Nothing is sampled and nothing stays cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qengine.core.request import Request
from qengine.core.step import Step
from qengine.errors import QEngineError
from qengine.runtime.engine import Engine

REQUEST_ID = "scoring"


def score(engine: Engine, token_ids: Sequence[int], rows: int) -> Iterator[torch.Tensor]:
    """Yield float32 [R, vocab_size], R <= `rows`, in order: row i belongs to token i and predicts token i + 1.

    At most `rows` rows of logits exist at a time, if the caller keeps none. The engine must be idle. Raises
    CapacityError when the sequence is longer than the engine's context or its cache. Leaving early is allowed.
    """
    if engine.has_work:
        raise QEngineError("scoring needs an idle engine")
    # Asking for prompt logprobs is what keeps a request off the prefix cache: every position is computed.
    request = Request(REQUEST_ID, list(token_ids), max_tokens=0, prompt_logprobs=True)
    engine.scheduler.add(request)
    done = 0
    try:
        while done < len(token_ids):
            step = engine.scheduler.schedule()
            assert step is not None
            hidden = _only_sequence(engine, step, done)
            done += len(hidden)
            for i in range(0, len(hidden), rows):
                yield engine.runner.logits(hidden[i : i + rows])
            if done < len(token_ids):
                engine.scheduler.update(step, [])
    finally:
        engine.abort([REQUEST_ID])


def _only_sequence(engine: Engine, step: Step, start: int) -> torch.Tensor:
    """Hidden states of the one sequence of a step, which must go on at `start`."""
    (sequence,) = step.sequences
    if sequence.start != start:
        raise QEngineError(f"scoring was to go on at position {start}, not {sequence.start}")
    _, hidden = engine.runner.forward(step)
    return hidden
