"""Beam search over anything that gives the likeliest next tokens of a few sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from qengine.errors import RequestError

Candidates = list[tuple[int, float]]
"""(token id, raw log-softmax) of one position, likeliest first."""
MAX_LENGTH_PENALTY = 10
"""Lengths to this power are still floats; ranking by it has long lost its meaning."""
NextTokens = Callable[[list[list[int]], int], list[Candidates]]
"""(sequences with their prompt, k) -> the k likeliest next tokens of each sequence."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Names as in vLLM. Beams are ranked by the sum of raw log-softmax over `length ** length_penalty`. `length`
    counts generated tokens (as in transformers; vLLM counts the prompt too) without an end-of-sequence token, whose
    logprob does count.

    `temperature` may only be 0 or 1: scaling would need the whole distribution of every step.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} is out of range", param=name, have=repr(value)[:80], need="an integer >= 1")
        power: object = self.length_penalty
        if isinstance(power, bool) or not isinstance(power, int | float) or not abs(power) <= MAX_LENGTH_PENALTY:
            need = f"a number in {-MAX_LENGTH_PENALTY}..{MAX_LENGTH_PENALTY}"
            raise RequestError("length_penalty is out of range", param="length_penalty", have=power, need=need)
        if self.temperature not in (0, 1):
            raise RequestError(
                "beam search ranks by raw log-probabilities", param="temperature", have=self.temperature, need="0 or 1"
            )


@dataclass(frozen=True)
class Beam:
    """`token_ids` are the generated ones. `finish_reason`: stop (its end-of-sequence token is the last id), length, or
    None while it grows."""

    token_ids: tuple[int, ...]
    cum_logprob: float
    finish_reason: str | None = None

    def score(self, length_penalty: float) -> float:
        """What beams are ranked by."""
        length = len(self.token_ids) - (self.finish_reason == "stop")
        return self.cum_logprob / max(length, 1) ** length_penalty


def beam_search(
    next_tokens: NextTokens, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int]
) -> list[Beam]:
    """The `beam_width` best continuations of one prompt, best first.

    Each step asks for 2 * beam_width candidates a beam; those that end a sequence are set aside (with `ignore_eos`
    they go on), the beam_width most likely others are the next beams. At max_tokens the remaining beams compete with
    the finished ones.
    """
    eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    prompt = list(prompt_token_ids)
    beams = [Beam((), 0.0)]
    finished: list[Beam] = []
    for step in range(params.max_tokens):
        candidates = next_tokens([prompt + list(b.token_ids) for b in beams], 2 * params.beam_width)
        grown: list[Beam] = []
        for beam, found in zip(beams, candidates, strict=True):
            for token, logprob in found:
                ids, total = (*beam.token_ids, token), beam.cum_logprob + logprob
                if token in eos:
                    finished.append(Beam(ids, total, "stop"))
                else:
                    grown.append(Beam(ids, total, "length" if step == params.max_tokens - 1 else None))
        # Ties are broken by the ids, so that equal inputs give equal beams.
        beams = sorted(grown, key=lambda b: (-b.cum_logprob, b.token_ids))[: params.beam_width]
        if not beams:
            break
    ranked = sorted(finished + beams, key=lambda b: (-b.score(params.length_penalty), b.token_ids))
    return ranked[: params.beam_width]
