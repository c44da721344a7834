"""Which waiting request may start now, and from which blocks it starts.

A request starts when all its known tokens fit beside what running prefills still owe and a small reserve for the
decodes. One that does not fit now may be passed by later ones that do, at most MAX_OVERTAKES times; then nothing
starts before it does. The running requests end, so it gets its turn and holds up the others only so long. A preempted
request is never passed: it would lose the room that it just gave.
"""

from __future__ import annotations

from dataclasses import dataclass

from qengine.core.pages import KVCacheManager
from qengine.core.prefix import PrefixHit
from qengine.core.request import Request, Status

MAX_OVERTAKES = 16
"""How often a waiting request may be passed by later ones while it does not fit."""


@dataclass(slots=True)
class _Wait:
    """What a request went through while waiting."""

    sibling: Request | None = None
    overtaken: int = 0
    refused_at: int = -1
    """The pool's `num_releases` when the request last did not fit: no use in trying again before it grows."""


class Admission:
    """State of the waiting requests beside their order. `max_chunk` is the token budget of a step."""

    def __init__(self, manager: KVCacheManager, max_chunk: int) -> None:
        self._manager = manager
        self._max_chunk = max_chunk
        self._waits: dict[str, _Wait] = {}
        self._reserve = max(1, manager.num_usable_blocks // 100)

    def enter(self, request: Request, sibling: Request | None = None) -> None:
        """A request begins to wait. `sibling` is the one named by `fork_of`, if it is still there: with an equal
        prompt and salt the two share the prompt's blocks, unless logits of the whole prompt are wanted."""
        if sibling is not None and (
            request.prompt_logprobs
            or sibling.cache_salt != request.cache_salt
            or sibling.prompt_token_ids != request.prompt_token_ids
        ):
            sibling = None
        self._waits[request.request_id] = _Wait(sibling)

    def leave(self, request: Request) -> None:
        """The request started or ended. Harmless when it was not waiting."""
        self._waits.pop(request.request_id, None)

    def waits_for_sibling(self, request: Request) -> bool:
        """Whether the sibling that this request shares its prompt with is still to compute it."""
        sibling = self._waits[request.request_id].sibling
        if sibling is None or sibling.finished:
            return False
        return self._manager.num_verified(sibling) < sibling.num_prompt_tokens

    def may_be_passed(self, request: Request) -> bool:
        """Whether later requests may start while this one does not fit."""
        return request.status is not Status.PREEMPTED and self._waits[request.request_id].overtaken < MAX_OVERTAKES

    def overtake(self, request: Request) -> None:
        """A later request started before this one."""
        self._waits[request.request_id].overtaken += 1

    def find_room(self, request: Request, owed: int, others_run: bool) -> PrefixHit | None:
        """What the request can share, when all its known tokens fit beside `owed` blocks; else None."""
        wait, manager = self._waits[request.request_id], self._manager
        if wait.refused_at == manager.pool.num_releases:
            return None
        available = manager.pool.num_available - owed - (self._reserve if others_run else 0)
        hit = self._shareable(request, wait.sibling)
        if manager.blocks_to_admit(request, hit, self._max_chunk) <= available:
            return hit
        if hit.num_tokens % manager.block_size:
            hit = manager.lookup(request, allow_copy=False)
            if manager.blocks_to_admit(request, hit, self._max_chunk) <= available:
                return hit
        wait.refused_at = manager.pool.num_releases
        return None

    def _shareable(self, request: Request, sibling: Request | None) -> PrefixHit:
        """The sibling's prompt blocks, or a cached prefix, or nothing."""
        if sibling is not None and not sibling.finished:
            hit = self._manager.share_of(sibling, request.num_prompt_tokens - 1)
            if hit is not None:
                return hit
        if request.prompt_logprobs and not request.output_token_ids:
            return self._manager.nothing_shared()
        return self._manager.lookup(request)
