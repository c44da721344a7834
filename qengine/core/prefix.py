"""Identity of cached blocks: chains of token ids, and the index from a chain to the block that holds its K/V.

A block's K/V depends on every token before it, so its identity is the chain of all token ids up to its end, rooted
in the request's salt and the cache's identity (adapter, KV dtype, scale version). The hash only finds candidates;
whether a candidate is a hit is decided by comparing the chains themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qengine.core.pool import NULL_BLOCK
from qengine.core.request import Request
from qengine.core.step import KVGroupSpec


class PrefixNode:
    """One full block of a chain. `parent` is None only at the root, whose `content` is (identity, salt)."""

    __slots__ = ("content", "hash", "parent")

    def __init__(self, parent: PrefixNode | None, content: tuple[object, ...]) -> None:
        self.parent = parent
        self.content = content
        self.hash: int = hash_block(0 if parent is None else parent.hash, content)


def hash_block(parent_hash: int, content: tuple[object, ...]) -> int:
    """Chain hash of one block: all its token ids and the hash of what precedes it."""
    return hash((parent_hash, content))


def same_chain(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    """Whether two chains hold the same ids from the root on. Ends early where they run into the same object."""
    while a is not b:
        if a is None or b is None or a.content != b.content:
            return False
        a, b = a.parent, b.parent
    return True


def extend_chain(chain: list[PrefixNode], request: Request, num_blocks: int, block_size: int, identity: str) -> None:
    """Append nodes until `chain` covers the first `num_blocks` full blocks of the request's known tokens."""
    if len(chain) >= num_blocks:
        return
    parent = chain[-1] if chain else PrefixNode(None, (identity, request.cache_salt))
    prompt, output = request.prompt_token_ids, request.output_token_ids
    num_prompt = len(prompt)
    for begin in range(len(chain) * block_size, num_blocks * block_size, block_size):
        end = begin + block_size
        if end <= num_prompt:
            ids = prompt[begin:end]
        else:
            ids = prompt[begin:] + output[max(0, begin - num_prompt) : end - num_prompt]
        parent = PrefixNode(parent, tuple(ids))
        chain.append(parent)


@dataclass(frozen=True)
class PrefixHit:
    """Blocks that a request can share. `blocks` is one table per group; 0 where a window no longer reaches, below zero
    for a block in host memory (`host_tier`).

    `num_tokens` tokens count as computed. When that ends inside a block, the block is copied before it is written.
    `from_sibling`: not a cached prefix, but the prompt of a request that runs. `num_verified`: how many of the tokens
    are known to be finite; None: all.
    """

    num_tokens: int
    blocks: list[list[int]]
    from_sibling: bool = False
    num_verified: int | None = None

    @classmethod
    def visible(
        cls, groups: Sequence[KVGroupSpec], tables: list[list[int]], num_tokens: int, block_size: int, sibling: bool
    ) -> PrefixHit:
        """The blocks of `tables` that hold the first `num_tokens` tokens and that the next token can see."""
        size = -(-num_tokens // block_size)
        blocks = []
        for group, table in zip(groups, tables, strict=True):
            first = min(size, group.first_block(num_tokens, block_size))
            blocks.append([NULL_BLOCK] * first + table[first:size])
        return cls(num_tokens, blocks, sibling)


class PrefixIndex:
    """Chain -> block id, for each KV group. Holds what blocks contain, not who uses them."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._blocks: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self._entries: list[tuple[int, PrefixNode] | None] = [None] * num_blocks

    @property
    def num_groups(self) -> int:
        return len(self._blocks)

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def holds(self, block: int) -> bool:
        return self._entries[block] is not None

    def entry(self, block: int) -> tuple[int, PrefixNode] | None:
        """Group and node of what `block` holds."""
        return self._entries[block]

    def find_node(self, group: int, node: PrefixNode) -> int:
        """The block of `group` that holds exactly this node's chain; 0 when there is none."""
        return self.find(group, [node], 0)

    def find(self, group: int, chain: list[PrefixNode], index: int) -> int:
        """The block of `group` that holds chain[index]; 0 when there is none.

        On a hit the request's chain goes on from the stored node, so that the next comparison ends after one step.
        """
        node = chain[index]
        block = self._blocks[group].get(node.hash, 0)
        if block == 0:
            return 0
        entry = self._entries[block]
        assert entry is not None
        stored = entry[1]
        if stored is not node:
            if not same_chain(stored, node):
                return 0
            chain[index] = stored
            if index + 1 < len(chain):
                chain[index + 1].parent = stored
        return block

    def longest(
        self,
        groups: Sequence[KVGroupSpec],
        chain: list[PrefixNode],
        num_blocks: int,
        num_tokens: int,
        block_size: int,
        below: PrefixIndex | None = None,
    ) -> PrefixHit:
        """The longest prefix, at most `num_blocks` blocks and `num_tokens - 1` tokens, from which a request can go on:
        full-attention groups need every block of it, sliding ones those that the next token can see. `below`: where
        else to look, in host memory."""
        found: list[list[int]] = [[] for _ in groups]
        runs = [0] * len(groups)
        best = 0
        for i in range(num_blocks):
            for g, group in enumerate(groups):
                block = self.find(g, chain, i)
                if block == 0 and below is not None:
                    block = -below.find(g, chain, i)
                found[g].append(block)
                runs[g] = runs[g] + 1 if block else 0
                if not block and group.window is None:
                    return PrefixHit.visible(groups, found, best, block_size, sibling=False)
            start = min((i + 1) * block_size, num_tokens - 1)
            if all(run > i - g.first_block(start, block_size) for run, g in zip(runs, groups, strict=True)):
                best = start
        return PrefixHit.visible(groups, found, best, block_size, sibling=False)

    def insert(self, group: int, node: PrefixNode, block: int) -> None:
        """Make `block` findable. The first block of equal content stays; a colliding hash is not stored twice."""
        blocks = self._blocks[group]
        if node.hash in blocks or self._entries[block] is not None:
            return
        blocks[node.hash] = block
        self._entries[block] = (group, node)

    def forget(self, block: int) -> None:
        """Drop what is known about `block`, if anything."""
        entry = self._entries[block]
        if entry is not None:
            self._entries[block] = None
            del self._blocks[entry[0]][entry[1].hash]

    def blocks(self) -> set[int]:
        """All block ids that are findable."""
        return {block for group in self._blocks for block in group.values()}
