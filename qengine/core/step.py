"""What the scheduler hands to the runner, and what comes back. Plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from qengine.core.request import Request


@dataclass
class ScheduledSequence:
    """`num_new_tokens` tokens of one request, from position `start` on, are computed in this step.

    `samples` is true when the last of them is the newest known token, so that a next token comes out.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool


@dataclass
class Step:
    """One batch. Decodes (one new token, sampling) come first.

    Before the forward pass the runner zeroes `zero_blocks` and then copies `copy_blocks` (source, destination) in
    all layers of the given group: blocks that held non-finite values, and copies on write.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    copy_blocks: list[tuple[int, int]] = field(default_factory=list)
    zero_blocks: list[int] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new_tokens for s in self.sequences)


@dataclass
class SampledToken:
    """What the runner returns for one sampling sequence: a token id, or `error` when its logits were not finite."""

    token_id: int
    error: str | None = None


@dataclass
class KVGroupSpec:
    """Layers that share block tables. `window` is the sliding window in tokens, None for full attention.

    Block ids are shared by all groups: every group has `layers_per_group` storage slots or fewer, and a block id owns
    one block in each of the pool's storage tensors; layer j of a group lives in storage tensor j.
    """

    window: int | None
    layers: list[int]
