"""The second pool of KV blocks, in host memory: what the device evicts and what preempted requests leave behind.

Nothing here moves a byte: copies are noted, handed out with the next step and made by the runner, all copies to the
host before anything is written to the device, all copies from it before anything reads. A host block that a step reads
is held until that step is handed out, so it isn't given to others meanwhile.

Blocks come here in two ways. Findable ones (full, finite, of a known chain of tokens) stay on the device as long as
they can and come when they are evicted; they are then found here as they were found there. What nobody can find, such
as the last, half full block of a preempted request, comes at once when that request is preempted. Blocks of a preempted
request that waits (`Parked`) are held here; others are kept until room is needed, least recently used first.
"""

from __future__ import annotations

from dataclasses import dataclass

from qengine.core.pool import BlockPool, IntegrityError
from qengine.core.prefix import PrefixIndex, PrefixNode
from qengine.core.swap_policy import SwapPolicy

STAGE_BYTES = 16 << 20
STAGES = 2
"""Buffers on the device for each direction: one is filled while the other is emptied."""


def stage_rows(block_bytes: int) -> int:
    """Blocks that one buffer holds."""
    return max(1, STAGE_BYTES // block_bytes)


def stage_bytes(block_bytes: int) -> int:
    """Device memory of all buffers, for blocks of so many bytes (over all layers)."""
    return 2 * STAGES * stage_rows(block_bytes) * block_bytes


@dataclass(slots=True, eq=False)
class Parked:
    """What a preempted request left behind. `tables`, one for each group, name a block on the device (above zero,
    findable there), one in host memory (below zero, held), or none that is needed (zero).

    `num_tokens` have K/V, `num_verified` of these are known to be finite. Not `complete` when a block was lost.
    """

    tables: list[list[int]]
    num_tokens: int
    num_verified: int
    complete: bool = True


@dataclass(frozen=True)
class HostStats:
    """Blocks of host memory at one moment; `num_parked` preempted requests have theirs there. `moved_out` and
    `moved_in`: blocks that were copied since the start."""

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    num_parked: int = 0
    moved_out: int = 0
    moved_in: int = 0


class HostTier:
    """`num_blocks` blocks of host memory, with ids from 1 on."""

    def __init__(self, num_blocks: int, num_groups: int, block_size: int, policy: SwapPolicy) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.index = PrefixIndex(num_groups, num_blocks + 1)
        self.policy = policy
        self.moved_out = 0
        self.moved_in = 0
        self.keeps_prefixes = policy.keeps(num_groups, block_size)
        self._parked: dict[str, Parked] = {}
        self._claims: dict[int, list[tuple[Parked, int, int]]] = {}
        """Device block -> where preempted requests have it in their tables."""
        self._outs: dict[int, int] = {}
        """Host block -> the device block that is copied to it."""
        self._ins: list[tuple[int, int]] = []

    # From the device

    def evict(self, block: int, group: int, node: PrefixNode) -> None:
        """The device is about to lose a findable block that nobody uses."""
        claims = self._claims.pop(block, [])
        if not claims and not self.keeps_prefixes:
            return
        host = self.index.find_node(group, node)
        if host == 0:
            if not self.pool.num_available:
                self._lose(claims)
                return
            host = self._take(block)
            self.index.insert(group, node, host)
        else:
            self.pool.share(host)
        for parked, g, i in claims:
            self.pool.share(host)
            parked.tables[g][i] = -host
        self.pool.release(host, self.index.holds(host))

    def lost(self, block: int) -> None:
        """A findable block's content is worth nothing any more."""
        self._lose(self._claims.pop(block, []))

    def _lose(self, claims: list[tuple[Parked, int, int]]) -> None:
        for parked, g, i in claims:
            parked.complete = False
            parked.tables[g][i] = 0

    def park(self, request_id: str, tables: list[list[int]], findable: PrefixIndex, tokens: int, verified: int) -> bool:
        """Keep the K/V of a request that is being preempted, unless it isn't worth it or there is no room. `findable`:
        what the device holds."""
        live = [(g, i, block) for g, table in enumerate(tables) for i, block in enumerate(table) if block]
        loose = sum(not findable.holds(block) for _, _, block in live)
        if not live or loose > self.pool.num_available or not self.policy.parks(len(live), tokens):
            return False
        parked = Parked([list(table) for table in tables], tokens, verified)
        for g, i, block in live:
            if findable.holds(block):
                self._claims.setdefault(block, []).append((parked, g, i))
            else:
                parked.tables[g][i] = -self._take(block)
        self._parked[request_id] = parked
        return True

    def _take(self, block: int) -> int:
        """A host block with one reference, to be filled from a device block."""
        host = self.pool.take()
        self.index.forget(host)
        self._outs[host] = block
        self.moved_out += 1
        return host

    # Back to the device

    def parked(self, request_id: str) -> Parked | None:
        """What is kept of a preempted request; None when there is nothing or a part of it was lost."""
        parked = self._parked.get(request_id)
        if parked is not None and not parked.complete:
            self.unpark(request_id)
            return None
        return parked

    def unpark(self, request_id: str) -> None:
        """The request has its blocks again, or needs them no more. Harmless when nothing is kept."""
        parked = self._parked.pop(request_id, None)
        if parked is None:
            return
        for table in parked.tables:
            for block in reversed(table):
                if block < 0:
                    self.pool.release(-block, self.index.holds(-block))
                elif block > 0:
                    left = [claim for claim in self._claims.pop(block) if claim[0] is not parked]
                    if left:
                        self._claims[block] = left

    def searched(self, preempted: bool) -> PrefixIndex | None:
        """Where prefixes are looked for beside the device; `preempted`: for a request that was."""
        if not self.keeps_prefixes or (preempted and self.policy.mode == "recompute"):
            return None
        return self.index

    def hold(self, tables: list[list[int]]) -> None:
        """The host blocks in `tables` are about to be read: they are given to nobody before the step is handed out."""
        for table in tables:
            for block in table:
                if block < 0:
                    self.pool.share(-block)

    def bring(self, host: int, block: int) -> None:
        """Copy a held host block to a block of the device."""
        self._ins.append((host, block))
        self.moved_in += 1

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(device block, host block) to copy out, then (host block, device block) to copy in. Each comes once."""
        outs, ins = [(block, host) for host, block in self._outs.items()], self._ins
        for host, _ in ins:
            self.pool.release(host, self.index.holds(host))
        self._outs, self._ins = {}, []
        return outs, ins

    def forget(self, nodes: list[PrefixNode]) -> None:
        """Nothing of these chains is handed out any more."""
        for g in range(self.index.num_groups):
            for node in nodes:
                host = self.index.find_node(g, node)
                if host:
                    self.index.forget(host)
                    self.pool.discard(host)

    # Watching

    @property
    def num_parked(self) -> int:
        """Preempted requests whose K/V is kept."""
        return len(self._parked)

    def stats(self) -> HostStats:
        pool = self.pool
        return HostStats(
            pool.num_usable, pool.num_used, pool.num_kept, self.num_parked, self.moved_out, self.moved_in
        )

    def check(self, findable: set[int]) -> None:
        """Raise IntegrityError unless free + cached + in use = all here too, every reference is that of a preempted
        request or of a copy, and every claim is on a block that the device can find (`findable`)."""
        expected: dict[int, int] = {}
        claims: dict[int, int] = {}
        for parked in self._parked.values():
            for table in parked.tables:
                for block in table:
                    if block < 0:
                        expected[-block] = expected.get(-block, 0) + 1
                    elif block > 0:
                        claims[block] = claims.get(block, 0) + 1
        for host, _ in self._ins:
            expected[host] = expected.get(host, 0) + 1
        try:
            self.pool.check(expected, self.index.blocks())
        except IntegrityError as e:
            raise IntegrityError(f"host memory: {e}") from e
        held = {block: len(places) for block, places in self._claims.items()}
        if held != claims or not held.keys() <= findable:
            lost = held.keys() - findable
            raise IntegrityError(f"preempted requests have {claims} on the device, noted are {held}, lost {lost}")
