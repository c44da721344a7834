"""Block ids and their reference counts; knows nothing of requests, tokens or layers."""

from __future__ import annotations

from collections import Counter, OrderedDict

from qengine.errors import CapacityError, QEngineError

NULL_BLOCK = 0
"""Stands in block tables for blocks that fell out of a sliding window. Never allocated, never counted."""


class IntegrityError(QEngineError):
    """The block accounting does not balance: a defect in qengine, never a user's fault."""


class BlockPool:
    """`num_blocks` block ids, of which `num_usable = num_blocks - 1`: block 0 is the null block.

    A usable block is in use (references > 0), kept (unreferenced, but its content may be asked for again; least
    recently used first), or free. All operations are O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CapacityError("a KV cache needs the null block and one usable block", have=num_blocks, need=2)
        self.num_blocks = num_blocks
        self.num_usable = num_blocks - 1
        self.num_releases = 0
        """Grows whenever a block becomes available: what did not fit before may fit now."""
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free and kept."""
        return len(self._free) + len(self._kept)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_available

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        """A block with one reference: a free one, else the least recently used kept one (whose content is lost)."""
        if self._free:
            block = self._free.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
        else:
            raise CapacityError("no KV block is left", have=f"0 of {self.num_usable} blocks", need="1 block")
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is in use or kept."""
        if self._refs[block] == 0:
            del self._kept[block]
        self._refs[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """One reference less; the last one makes the block kept (`keep`) or free."""
        refs = self._refs[block] - 1
        if refs < 0 or block == NULL_BLOCK:
            raise IntegrityError(f"block {block} was released {-refs} times more often than taken")
        self._refs[block] = refs
        if refs == 0:
            self.num_releases += 1
            if keep:
                self._kept[block] = None
            else:
                self._free.append(block)

    def discard(self, block: int) -> None:
        """A kept block's content is worth nothing any more: make it free. No effect on other blocks."""
        if block in self._kept:
            del self._kept[block]
            self._free.append(block)

    def check(self, expected_refs: dict[int, int], findable: set[int]) -> None:
        """Raise IntegrityError, showing both sides, unless every usable block is accounted for exactly once."""
        refs, kept, free = self._refs, self._kept.keys(), set(self._free)
        num_used = self.num_blocks - refs.count(0)
        parts = len(self._free) + len(kept) + num_used
        twice = len(free) < len(self._free) or not free.isdisjoint(kept)
        if parts != self.num_usable or twice or any(map(refs.__getitem__, free)) or any(map(refs.__getitem__, kept)):
            places = Counter([*self._free, *kept, *(b for b, count in enumerate(refs) if count)])
            missing = sorted(set(range(1, self.num_blocks)) - places.keys())[:10]
            doubled = sorted(b for b, count in places.items() if count > 1)[:10]
            raise IntegrityError(
                f"free {len(self._free)} + cached {len(kept)} + in use {num_used} = {parts} blocks, but the pool has "
                f"{self.num_usable}; nowhere: {missing}, in two places: {doubled}"
            )
        if len(expected_refs) != num_used or any(refs[b] != count for b, count in expected_refs.items()):
            used = {b for b, count in enumerate(refs) if count}
            wrong = sorted(b for b in used | expected_refs.keys() if refs[b] != expected_refs.get(b, 0))[:10]
            raise IntegrityError(
                f"reference counts differ: pool {[(b, refs[b]) for b in wrong]}, "
                f"block tables {[(b, expected_refs.get(b, 0)) for b in wrong]}"
            )
        if not kept <= findable or not free.isdisjoint(findable):
            raise IntegrityError(
                f"kept blocks that cannot be found: {sorted(kept - findable)[:10]}; "
                f"free blocks that can: {sorted(free & findable)[:10]}"
            )
