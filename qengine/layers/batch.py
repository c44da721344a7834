"""The one description of a step that the layers see. Built by the runner, read by attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class GroupBatch:
    """Block tables of one KV group (layers that share a cache kind: full attention, or one sliding window).

    block_tables  int32 [num_seqs, max_blocks]; blocks that fell out of a sliding window hold 0 (the null block)
    slot_mapping  int64 [num_tokens]: block * block_size + offset where each token's K/V is written
    """

    block_tables: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass
class Batch:
    """One step's tokens. Sequences with one token (decodes) come first, so tokens 0..num_decodes-1 are the decodes.

    positions    int64 [num_tokens]
    query_start  int32 [num_seqs + 1]: first token of each sequence, and the total
    seq_lens     int32 [num_seqs]: cached tokens after this step (old ones plus this step's)
    host_*       the same numbers as Python lists, so that CPU code and planners need no device read
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    host_query_lens: list[int]
    host_seq_lens: list[int]
    groups: list[GroupBatch]
    block_size: int
    scratch: dict[Any, Any] = field(default_factory=dict)
    """Per-step memo for work that is equal in all layers of a group (gather indices, masks); keyed by the user."""

    @property
    def max_query_len(self) -> int:
        return max(self.host_query_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.host_seq_lens, default=0)
