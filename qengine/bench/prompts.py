"""What is asked: prompt and output lengths, and random tokens or words to fill them. The same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHAT_INPUT, CHAT_OUTPUT = (4.2, 1.35, 1024), (4.9, 1.0, 1024)
"""(mean and standard deviation of the logarithm, largest): prompts with a median of 67 tokens, answers with one of 134,
both with a long tail. An imitation of what people ask and get; there is no data set behind it."""
LEAST = 4

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back"
)
WORDS = _WORDS.split()
"""Words that nearly every tokenizer knows whole."""


@dataclass(frozen=True)
class Ask:
    """One request: how many tokens (or words) its prompt has, and how many are to be generated. `seed` fills it."""

    input_len: int
    output_len: int
    seed: int


def asks(
    name: str, count: int, input_len: int, output_len: int, range_ratio: float, seed: int, most: int | None = None
) -> list[Ask]:
    """`name` is one of `options.DATASETS`. `most`: prompt and output together stay below it; prompts give way."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        if name == "sharegpt-like":
            prompt, output = _spread(rng, *CHAT_INPUT), _spread(rng, *CHAT_OUTPUT)
        else:
            prompt, output = (_around(rng, n, range_ratio) for n in (input_len, output_len))
        if most is not None:
            output = min(output, most - 1)
            prompt = max(1, min(prompt, most - output))
        made.append(Ask(prompt, output, rng.getrandbits(48)))
    return made


def _spread(rng: random.Random, mean: float, deviation: float, most: int) -> int:
    return max(LEAST, min(most, round(rng.lognormvariate(mean, deviation))))


def _around(rng: random.Random, n: int, ratio: float) -> int:
    return max(1, rng.randint(round(n * (1 - min(ratio, 1.0))), round(n * (1 + ratio))))


def fill(ask: Ask, prefix: int, draw: Callable[[random.Random], int]) -> list[int]:
    """Ids of one prompt, drawn by `draw`: first `prefix` ones that are equal for all, then its own."""
    common, own = random.Random(0), random.Random(ask.seed)
    return [draw(common) for _ in range(prefix)] + [draw(own) for _ in range(ask.input_len)]


def token_ids(ask: Ask, prefix: int, vocab_size: int, reserved: Sequence[int] = ()) -> list[int]:
    """Random ids but for `reserved` ones (those that would end a text)."""
    taken = set(reserved)

    def draw(rng: random.Random) -> int:
        while (token := rng.randrange(vocab_size)) in taken:
            pass
        return token

    return fill(ask, prefix, draw)


def words(ask: Ask, prefix: int) -> str:
    """As many common words as the prompt is to have tokens."""
    return " ".join(WORDS[i] for i in fill(ask, prefix, lambda rng: rng.randrange(len(WORDS))))
