"""A request as the scheduler sees it: ids, limits and progress; no text, no tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """One sequence.

    `sampling` is opaque to the core: the runner hands it to the sampler. `num_computed_tokens` counts the tokens whose
    K/V lie in the cache once the steps that were handed out have run; everything after it (prompt or generated) is
    still to be scheduled. Generated ids are kept through preemption.

    A step may be scheduled while the one before it still runs: then the newest tokens exist, but their ids are not
    known here yet. `num_pending` counts them.

    `fork_of`: request id of the sibling whose prompt blocks this one shares (n > 1); it waits until that sibling's
    prompt is computed, or until the sibling has ended, in which case it computes its prompt itself.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    prompt_logprobs: bool = False
    fork_of: str | None = None
    needs_ids: bool = False
    """Whether the choice of its next token depends on the ids of all tokens before it."""
    sampling: Any = None
    sequence_number: int = 0
    """Order of admission to the scheduler, which sets it; breaks ties of `arrival`."""
    token_limit: int = 0
    """Prompt and generated tokens at which it ends by length; set by the scheduler."""

    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Tokens whose K/V it had to give back when it was last preempted."""
    block_tables: list[list[int]] = field(default_factory=list)
    """One block table per KV group; block id 0 is the null block (fell out of a sliding window)."""
    table_changes: int = 0
    """Grows whenever blocks were put into the tables, so that who keeps a copy knows when to look."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, those included whose ids are not known yet."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
