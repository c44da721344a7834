"""Whether K/V is worth moving: what a copy to host memory and back costs beside computing the tokens again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SwapMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True)
class SwapCosts:
    """Seconds, as measured at start: `move` for a round trip of one block, `start` once for each round trip,
    `token` for a token in a prefill."""

    move: float
    start: float
    token: float

    def of_moving(self, blocks: int) -> float:
        return self.start + blocks * self.move

    def of_computing(self, tokens: int) -> float:
        return tokens * self.token


@dataclass(frozen=True)
class SwapPolicy:
    """`auto` compares costs; `swap` and `recompute` say what becomes of preempted sequences whatever it costs.

    A copied prompt is of use to others too: evicted prefix blocks stay in host memory unless `auto` finds that
    computing them is quicker.
    """

    mode: SwapMode
    costs: SwapCosts | None = None

    def __post_init__(self) -> None:
        if self.mode == "auto" and self.costs is None:
            raise ValueError("auto compares costs: they have to be measured first")

    def parks(self, blocks: int, tokens: int) -> bool:
        """Whether a preempted sequence of so many blocks and computed tokens is moved."""
        if self.costs is None or self.mode != "auto":
            return self.mode == "swap"
        return self.costs.of_moving(blocks) < self.costs.of_computing(tokens)

    def keeps(self, blocks: int, tokens: int) -> bool:
        """Whether prefix blocks that leave the device are kept, `blocks` of all groups holding `tokens` tokens."""
        if self.costs is None or self.mode != "auto":
            return True
        return blocks * self.costs.move < self.costs.of_computing(tokens)
