"""What the KV manager keeps of one request, and its numbers at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from qengine.core.prefix import PrefixNode
from qengine.core.request import Request

NEVER = 1 << 62
"""A token count that no request reaches."""


@dataclass(frozen=True)
class KVStats:
    """Blocks and token slots at one moment; `blocks_total` counts usable blocks (without the null block).

    `slots_wasted` are slots of blocks in use that no token was written to yet.
    """

    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    slots_allocated: int
    slots_wasted: int


@dataclass(slots=True, eq=False)
class Holding:
    """What the manager knows about one request beside its block tables."""

    request: Request
    dropped: list[int]
    """Per group: leading blocks that fell out of the window."""
    chain: list[PrefixNode] = field(default_factory=list)
    cached: int = 0
    """Leading blocks that were offered to the prefix cache."""
    reserved: int = 0
    """Tokens that have a slot, computed or about to be."""
    own_block: int = -1
    """Index of the last block written to: known to be nobody else's."""
    next_leave: int = NEVER
    """Number of computed tokens at which the next block falls out of a window."""
    verified: int = 0
    """Tokens known to be finite: from the cache, or followed by a token sampled from finite logits."""
