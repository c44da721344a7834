"""Identity of cached blocks: chains of token ids, and the index from a chain to the block that holds its K/V.

A block's K/V depends on every token before it, so its identity is the chain of all token ids up to its end, rooted
in the request's salt and the cache's identity (adapter, KV dtype, scale version). The hash only finds candidates;
whether a candidate is a hit is decided by comparing the chains themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from qengine.core.request import Request


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
    """Blocks that a request can share. `blocks` is one table per group; 0 where a window no longer reaches.

    `num_tokens` tokens count as computed. When that ends inside a block, the block is copied before it is written.
    """

    num_tokens: int
    blocks: list[list[int]]


class PrefixIndex:
    """Chain -> block id, for each KV group. Holds what blocks contain, not who uses them."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._blocks: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self._entries: list[tuple[int, PrefixNode] | None] = [None] * num_blocks

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def holds(self, block: int) -> bool:
        return self._entries[block] is not None

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
