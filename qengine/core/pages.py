"""The paged KV manager: which request owns which blocks, what is shared, what is cached.

Blocks are taken when their first token is about to be computed, never earlier. A block that others use or that the
prefix cache can hand out is never written: it is copied first. Only full blocks enter the cache, and only once a
later token of the same request was sampled from finite logits; whatever a request leaves unverified is zeroed before
its next use.

With a `host` tier, what falls out of the pool and what preempted requests hold goes to host memory and comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qengine.core.holding import NEVER, Holding, KVStats
from qengine.core.host_tier import HostStats, HostTier
from qengine.core.pool import NULL_BLOCK, BlockPool, IntegrityError
from qengine.core.prefix import PrefixHit, PrefixIndex, extend_chain
from qengine.core.request import Request, Status
from qengine.core.step import KVGroupSpec, blocks_for
from qengine.errors import CapacityError


class KVCacheManager:
    """Block tables of all requests over one pool of `num_blocks` ids, one of them the null block.

    `groups` share the id space; a request has one table per group, all of equal length. `identity` names everything
    beside token ids and salt that K/V depend on (adapter, KV dtype, scale version).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroupSpec],
        enable_prefix_caching: bool = True,
        identity: str = "",
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.groups = list(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.identity = identity
        self._index = PrefixIndex(len(self.groups), num_blocks)
        self._holdings: dict[str, Holding] = {}
        self._soiled: set[int] = set()
        self._zero: list[int] = []
        self.host: HostTier | None = None
        """Set before the first request comes."""
        self._copied: list[int] = []
        """Sources of this step's copies on write, each with a reference: nothing may be copied over them before."""

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` needs at most when `max_chunk` tokens are computed a step."""
        return blocks_for(self.groups, num_tokens, self.block_size, max_chunk)

    # Sharing: prefix hits and forks

    def nothing_shared(self) -> PrefixHit:
        return PrefixHit(0, [[] for _ in self.groups])

    def lookup(self, request: Request, allow_copy: bool = True) -> PrefixHit:
        """The longest cached prefix of the request's known tokens; changes nothing but hashes.

        At least the last token is left to compute. Where all tokens are cached, that means a copy of the last block,
        which takes a block more than the tables hold for a moment; `allow_copy=False` leaves that block out.
        """
        kept = self._parked_hit(request)
        if kept is not None:
            return kept
        if not self.enable_prefix_caching:
            return self.nothing_shared()
        num_tokens, chain = request.num_tokens, self._holding(request).chain
        num_blocks = (num_tokens if allow_copy else num_tokens - 1) // self.block_size
        extend_chain(chain, request, num_blocks, self.block_size, self.identity)
        below = None if self.host is None else self.host.searched(request.status is Status.PREEMPTED)
        return self._index.longest(self.groups, chain, num_blocks, num_tokens, self.block_size, below)

    def _parked_hit(self, request: Request) -> PrefixHit | None:
        """What a preempted request left in host memory or on the device, if all of it is there."""
        if self.host is None or (parked := self.host.parked(request.request_id)) is None:
            return None
        hit = PrefixHit.visible(self.groups, parked.tables, parked.num_tokens, self.block_size, sibling=False)
        for table in hit.blocks:
            for i, block in enumerate(table):
                entry = self.host.index.entry(-block) if block < 0 else None
                if entry is not None:  # others may have brought it back meanwhile
                    table[i] = self._index.find_node(*entry) or block
        return replace(hit, num_verified=parked.num_verified)

    def share_of(self, parent: Request, num_tokens: int) -> PrefixHit | None:
        """The parent's blocks of its first `num_tokens` computed tokens; None where a window has let them go."""
        holding = self._holdings.get(parent.request_id)
        if holding is None or holding.verified < num_tokens or not parent.block_tables:
            return None
        hit = PrefixHit.visible(self.groups, parent.block_tables, num_tokens, self.block_size, sibling=True)
        for group, table in zip(self.groups, hit.blocks, strict=True):
            if NULL_BLOCK in table[group.first_block(num_tokens, self.block_size) :]:
                return None
        holding.own_block = -1
        return hit

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Let `child` start from the parent's blocks of their common first `num_tokens` tokens; False: it cannot."""
        hit = self.share_of(parent, num_tokens)
        if hit is not None:
            self.attach(child, hit)
        return hit is not None

    def attach(self, request: Request, hit: PrefixHit) -> None:
        """Give a request that owns nothing the blocks of a hit; its tokens count as computed."""
        if request.block_tables:
            raise IntegrityError(f"request {request.request_id} already owns blocks")
        holding = self._holding(request)
        for table in hit.blocks:
            for block in table:
                if block > 0:
                    self.pool.share(block)
        request.block_tables = [list(table) for table in hit.blocks]
        if self.host is not None:
            self._bring_back(request, hit.num_tokens)
        request.table_changes += 1
        request.num_computed_tokens = holding.reserved = hit.num_tokens
        holding.verified = hit.num_tokens if hit.num_verified is None else hit.num_verified
        holding.cached = holding.verified // self.block_size
        for g, group in enumerate(self.groups):
            holding.dropped[g] = min(len(hit.blocks[g]), group.first_block(hit.num_tokens, self.block_size))
        self._plan_leave(holding)

    def _bring_back(self, request: Request, num_tokens: int) -> None:
        """Replace host blocks in the tables by blocks of the device, and give up what else is kept for the request. A
        block that is to be written behind `num_tokens` tokens comes as a private one, as do those nobody can find."""
        assert self.host is not None
        self.host.hold(request.block_tables)
        for g, table in enumerate(request.block_tables):
            for i, held in enumerate(table):
                if held >= 0:
                    continue
                block = table[i] = self._take()
                self.host.bring(-held, block)
                entry = self.host.index.entry(-held)
                if entry is not None and (i + 1) * self.block_size <= num_tokens:
                    self._index.insert(g, entry[1], block)
        self.host.unpark(request.request_id)

    # Room

    def blocks_to_admit(self, request: Request, hit: PrefixHit, max_chunk: int) -> int:
        """Available blocks that it takes to start from `hit` and to compute all known tokens of the request."""
        refs = self.pool.refs
        held = sum(1 for table in hit.blocks for block in table if block > 0 and refs(block) > 0)
        copies = sum(table[-1] > 0 for table in hit.blocks) if hit.num_tokens % self.block_size else 0
        return self.max_blocks(request.num_tokens, max_chunk) - held + copies

    def blocks_owed(self, request: Request, max_chunk: int) -> int:
        """Blocks that a running request still has to take until all its known tokens are computed."""
        holding = self._holdings[request.request_id]
        live = sum(len(table) - gone for table, gone in zip(request.block_tables, holding.dropped, strict=True))
        return max(0, self.max_blocks(request.num_tokens, max_chunk) - live)

    def fit(self, request: Request, num_new_tokens: int) -> int:
        """How many of the next `num_new_tokens` tokens there is room for. Gives back blocks outside the windows."""
        if not request.block_tables:
            self.attach(request, self.nothing_shared())
        holding, tables = self._holdings[request.request_id], request.block_tables
        start = request.num_computed_tokens
        if start >= holding.next_leave:
            self._leave_windows(holding)
        room = len(tables[0]) * self.block_size
        copies = 0
        if start < room and start // self.block_size != holding.own_block:
            copies = sum(1 for table in tables if self._must_copy(table[start // self.block_size]))
        if copies == 0 and start + num_new_tokens <= room:
            return num_new_tokens
        spare = self.pool.num_available - copies
        if spare < 0:
            return 0
        room += spare // len(tables) * self.block_size
        return max(0, min(num_new_tokens, room - start))

    def can_allocate(self, request: Request, num_new_tokens: int) -> bool:
        return self.fit(request, num_new_tokens) == num_new_tokens

    def allocate(self, request: Request, num_new_tokens: int) -> list[tuple[int, int]]:
        """Make every slot of the next `num_new_tokens` tokens writable. Returns block copies (source, destination).

        Raises CapacityError, having taken nothing, when there is no room.
        """
        fit = self.fit(request, num_new_tokens)
        if fit < num_new_tokens:
            raise CapacityError(
                f"no room for the next tokens of request {request.request_id}",
                have=f"{fit} tokens ({self.pool.num_available} of {self.num_usable_blocks} blocks available)",
                need=f"{num_new_tokens} tokens",
            )
        return self.extend(request, num_new_tokens)

    def step_inside(self, request: Request) -> bool:
        """`fit` and `extend` for one token where that takes nothing: its slot lies in the block last written to. False
        where they have to be asked; then nothing has changed."""
        holding = self._holdings.get(request.request_id)
        start = request.num_computed_tokens
        if holding is None or start // self.block_size != holding.own_block or start >= holding.next_leave:
            return False
        holding.reserved = start + 1
        return True

    def extend(self, request: Request, num_new_tokens: int) -> list[tuple[int, int]]:
        """`allocate` for a number of tokens that `fit` has just returned."""
        holding, tables = self._holdings[request.request_id], request.block_tables
        start = request.num_computed_tokens
        copies: list[tuple[int, int]] = []
        index = start // self.block_size
        if index < len(tables[0]) and index != holding.own_block:
            for table in tables:
                source = table[index]
                if self._must_copy(source):
                    table[index] = self._take()
                    copies.append((source, table[index]))
                    if self.host is None:
                        self.pool.release(source, self._index.holds(source))
                    else:
                        self._copied.append(source)
        holding.reserved = start + num_new_tokens
        holding.own_block = (holding.reserved - 1) // self.block_size
        more = holding.own_block + 1 - len(tables[0])
        for _ in range(more):
            for table in tables:
                table.append(self._take())
        request.table_changes += bool(copies) or more > 0
        return copies

    def _must_copy(self, block: int) -> bool:
        return self.pool.refs(block) > 1 or self._index.holds(block)

    def _take(self) -> int:
        block = self.pool.take()
        if self.host is not None and (entry := self._index.entry(block)) is not None:
            self.host.evict(block, *entry)
        self._index.forget(block)
        if block in self._soiled:
            self._soiled.discard(block)
            self._zero.append(block)
        return block

    def _leave_windows(self, holding: Holding) -> None:
        """Give back the blocks that no token from `num_computed_tokens` on can see."""
        request = holding.request
        for g, group in enumerate(self.groups):
            table = request.block_tables[g]
            first = min(len(table), group.first_block(request.num_computed_tokens, self.block_size))
            for i in range(holding.dropped[g], first):
                self._give_back(holding, i, table[i])
                table[i] = NULL_BLOCK
            holding.dropped[g] = max(first, holding.dropped[g])
        self._plan_leave(holding)

    def _plan_leave(self, holding: Holding) -> None:
        windows = zip(self.groups, holding.dropped, strict=True)
        leaves = ((gone + 1) * self.block_size + g.window - 1 for g, gone in windows if g.window is not None)
        holding.next_leave = min(leaves, default=NEVER)

    # After a step, and the end

    def num_verified(self, request: Request) -> int:
        """Leading tokens of a request whose K/V are there and known to be finite."""
        holding = self._holdings.get(request.request_id)
        return 0 if holding is None else holding.verified

    def settle(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are known, computed and finite: new full blocks among them may be cached."""
        holding = self._holdings[request.request_id]
        holding.verified = num_tokens
        full = num_tokens // self.block_size
        if full == holding.cached or not self.enable_prefix_caching:
            return
        extend_chain(holding.chain, request, full, self.block_size, self.identity)
        for i in range(holding.cached, full):
            for g, table in enumerate(request.block_tables):
                if table[i] and table[i] not in self._soiled:
                    self._index.insert(g, holding.chain[i], table[i])
        holding.cached = full

    def taint(self, request: Request) -> None:
        """The request met non-finite values: nothing it read or wrote stays cached, and all of it is zeroed before
        its next use. Blocks that others share stay theirs. Call before `free`."""
        for table in request.block_tables:
            for block in table:
                if block:
                    self._soil(block)
        if self.host is not None and request.request_id in self._holdings:
            self.host.forget(self._holdings[request.request_id].chain)

    def preempt(self, request: Request) -> bool:
        """Give back everything for now; whether it is kept, so that the request goes on from where it stands."""
        kept = False
        # Logits of the prompt are wanted of one pass, so a prompt that isn't through begins anew.
        if self.host is not None and (request.output_token_ids or not request.prompt_logprobs):
            computed, verified = request.num_computed_tokens, self._holdings[request.request_id].verified
            kept = self.host.park(request.request_id, request.block_tables, self._index, computed, verified)
        self._release(request)
        return kept

    def free(self, request: Request) -> None:
        """Give back everything. Harmless when the request owns nothing."""
        if self.host is not None:
            self.host.unpark(request.request_id)
        self._release(request)

    def _release(self, request: Request) -> None:
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        for table in request.block_tables:
            for i in range(len(table) - 1, -1, -1):
                if table[i]:
                    self._give_back(holding, i, table[i])
        request.block_tables = []
        request.num_computed_tokens = 0

    def take_zero_blocks(self) -> list[int]:
        """Blocks in use again that must be zeroed before the next forward pass. Each is reported once."""
        blocks, self._zero = self._zero, []
        return blocks

    def take_swaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Copies to host memory (device block, host block) and from it (host block, device block) that belong to the
        step that is handed out now. Each is reported once."""
        for source in self._copied:
            self.pool.release(source, self._index.holds(source))
        self._copied.clear()
        return ([], []) if self.host is None else self.host.take_copies()

    def _give_back(self, holding: Holding, index: int, block: int) -> None:
        """Release one block; soiled when it holds tokens that nothing has shown to be finite."""
        if min(holding.reserved, (index + 1) * self.block_size) > holding.verified:
            self._soil(block)
        self.pool.release(block, self._index.holds(block))

    def _soil(self, block: int) -> None:
        self._index.forget(block)
        self.pool.discard(block)
        self._soiled.add(block)
        if self.host is not None:
            self.host.lost(block)

    def _holding(self, request: Request) -> Holding:
        holding = self._holdings.get(request.request_id)
        if holding is None:
            holding = self._holdings[request.request_id] = Holding(request, [0] * len(self.groups))
        return holding

    # Watching

    def stats(self) -> KVStats:
        pool, block_size = self.pool, self.block_size
        wasted = 0
        for holding in self._holdings.values():
            for table in holding.request.block_tables:
                wasted += len(table) * block_size - holding.request.num_computed_tokens
        return KVStats(
            blocks_total=pool.num_usable,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_kept,
            blocks_free=pool.num_free,
            slots_allocated=pool.num_used * block_size,
            slots_wasted=wasted,
        )

    def host_stats(self) -> HostStats:
        return HostStats() if self.host is None else self.host.stats()

    def check(self) -> None:
        """Raise IntegrityError unless free + cached + in use = all and every reference belongs to a block table."""
        expected: dict[int, int] = {}
        for holding in self._holdings.values():
            for table in holding.request.block_tables:
                for block in table:
                    if block:
                        expected[block] = expected.get(block, 0) + 1
        for block in self._copied:
            expected[block] = expected.get(block, 0) + 1
        findable = self._index.blocks()
        self.pool.check(expected, findable)
        if findable & self._soiled:
            raise IntegrityError(f"blocks both cached and to be zeroed: {sorted(findable & self._soiled)[:10]}")
        if self.host is not None:
            self.host.check(findable)
