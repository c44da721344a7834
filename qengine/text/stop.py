"""One matcher of stop strings, for streamed and whole answers alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StopMatch:
    """What one piece of text gave: `text` may be shown; `stop` is the stop string that ended the answer, or None."""

    text: str
    stop: str | None = None


@dataclass
class _Node:
    """A prefix of one or more stop strings. `depth` is its length; `stop` the longest stop string that ends here."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fall: _Node | None = None
    stop: str | None = None


class StopMatcher:
    """Ends an answer at the first stop string that becomes complete in the running text.

    Of several that end at the same character the longest counts, so that the text is cut as far left as possible.
    The result does not depend on how the text is cut into pieces. Text is held back only while it is a proper prefix
    of a stop string; nothing of a stop string is ever shown, unless `include` asks for it (nothing is held then).

    An Aho-Corasick automaton: the state's depth is exactly the number of characters to hold back, and each character
    costs amortised constant time.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`stops`: non-empty strings, may be none. `include`: the stop string is part of the shown text."""
        self._include = include
        self._root = _build(stops)
        self._state = self._root
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopMatch:
        """Add a piece of text. After a match everything further is swallowed."""
        if self.matched is not None:
            return StopMatch("")
        if not self._root.next:
            return StopMatch(text)
        state = self._state
        for i, char in enumerate(text):
            state = self._step(state, char)
            if state.stop is not None:
                self.matched = state.stop
                end = len(self._held) + i + 1
                shown = (self._held + text)[: end if self._include else end - len(state.stop)]
                self._held = ""
                return StopMatch(shown, state.stop)
        self._state = state
        seen = self._held + text
        keep = 0 if self._include else state.depth
        self._held = seen[len(seen) - keep :]
        return StopMatch(seen[: len(seen) - keep])

    def flush(self) -> str:
        """The held text, at the end of an answer that no stop string ended."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _step(self, state: _Node, char: str) -> _Node:
        node: _Node | None = state
        while node is not None:
            if (found := node.next.get(char)) is not None:
                return found
            node = node.fall
        return self._root


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.stop = stop
    queue = deque(root.next.values())
    for child in queue:
        child.fall = root
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            fall = node.fall
            while fall is not None and char not in fall.next:
                fall = fall.fall
            child.fall = fall.next[char] if fall is not None else root
            child.stop = child.stop or child.fall.stop
            queue.append(child)
    return root
