"""What the scheduler hands to the runner, and what comes back. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qengine.core.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """`num_new_tokens` tokens of one request, from position `start` on, are computed in this step.

    `samples` is true when the last of them is the newest token, so that a next token comes out. The id of that newest
    token may not be known yet: then the step before this one samples it.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool


@dataclass
class Step:
    """One batch. Decodes (one new token, sampling) come first.

    Before the forward pass the runner copies `swap_out` (device block, host block), zeroes `zero_blocks` (they may hold
    non-finite values of an earlier request), copies `swap_in` (host block, device block) and then `copy_blocks`
    (source, destination; copies on write), each in every storage tensor, in this order.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    copy_blocks: list[tuple[int, int]] = field(default_factory=list)
    zero_blocks: list[int] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new_tokens for s in self.sequences)


@dataclass(slots=True)
class SampledToken:
    """What the runner returns for one sampling sequence: a token id, or `error` when its logits were not finite."""

    token_id: int
    error: str | None = None


@dataclass(slots=True)
class Progress:
    """What one step gave to one request. Every token is reported exactly once, also across preemptions. `row`: which of
    the step's sampling sequences it was."""

    request: Request
    new_token_ids: list[int]
    finished: bool
    row: int


@dataclass
class KVGroupSpec:
    """Layers that share block tables. `window` is the sliding window in tokens, None for full attention.

    Block ids are shared by all groups: every group has as many layers as the pool has storage tensors, or fewer, and
    a block id owns one block in each of them; layer j of a group lives in storage tensor j.
    """

    window: int | None
    layers: list[int]

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at `position` can see (position p sees p - window + 1 .. p)."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Most blocks a sequence of `num_tokens` holds at once when at most `max_chunk` tokens are computed a step."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        span = self.window - 1 + min(max_chunk, num_tokens)
        return min(whole, (span + block_size - 2) // block_size + 1)


def blocks_for(groups: Sequence[KVGroupSpec], num_tokens: int, block_size: int, max_chunk: int) -> int:
    """Block ids that one sequence of `num_tokens` needs at most, all groups together."""
    return sum(group.max_blocks(num_tokens, block_size, max_chunk) for group in groups)
