"""Changes to logits that a request asks for: bias, bad words, min_tokens, penalties.

All are sparse: each touches a few ids of a row, so that a batch costs two or three scatters, whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from qengine.core.request import Request
from qengine.sampling_params import SamplingParams


class LogitEdits:
    """Applies edits; keeps, for requests with penalties, which tokens were seen how often."""

    def __init__(self) -> None:
        self._seen: dict[str, SeenTokens] = {}

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def apply(
        self, logits: torch.Tensor, requests: Sequence[Request], positions: Sequence[int], rows: Sequence[int]
    ) -> torch.Tensor:
        """Edited copy of logits float32 [R, V], or `logits` itself where no request asks for an edit.

        `rows`: those that may need one (see `may_edit`); `positions`: how many tokens each request has generated, also
        where not all their ids are known yet.

        Order: logit_bias; then -inf for what bad_words and min_tokens forbid; then the repetition penalty over prompt
        and output, the frequency and the presence penalty over the output.
        """
        bias, forbidden, penalty = _Cells(1), _Cells(0), _Cells(2)
        for row in rows:
            request = requests[row]
            p: SamplingParams = request.sampling
            if p.logit_bias:
                bias.add(row, list(p.logit_bias), [list(p.logit_bias.values())])
            banned = forbidden_words(p.bad_words_token_ids, request.output_token_ids)
            banned += _too_early(request, positions[row])
            if banned:
                forbidden.add(row, banned)
            if has_penalty(p):
                ids, factor, minus = self._penalties(request)
                penalty.add(row, ids, [factor, minus])
        if not (bias or forbidden or penalty):
            return logits
        work = logits.clone()
        if bias:
            at, values = bias.tensors(work.device)
            work[at] += values[0]
        if forbidden:
            at, _ = forbidden.tensors(work.device)
            # Made on the device: assigning a Python number copies it there and waits.
            work[at] = torch.full((), -torch.inf, device=work.device)
        if penalty:
            at, values = penalty.tensors(work.device)
            old = work[at]
            work[at] = torch.where(old > 0, old / values[0], old * values[0]) - values[1]
        return work

    def _penalties(self, request: Request) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, repetition factor, what to subtract), one entry a token seen."""
        p: SamplingParams = request.sampling
        seen = self._seen.get(request.request_id)
        if seen is None:
            seen = self._seen[request.request_id] = SeenTokens(request.prompt_token_ids)
        ids, counts = seen.update(request.output_token_ids)
        minus = p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
        return ids, np.full(len(ids), p.repetition_penalty), minus


class SeenTokens:
    """Distinct tokens of a prompt and its output, with their counts in the output; updated token by token."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        first = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._at = {token: i for i, token in enumerate(first.tolist())}
        self._ids = first
        self._counts = np.zeros(len(first))
        self._consumed = 0

    def update(self, output_token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Take in what was generated since the last call; (ids int64, counts float64), one entry a distinct token."""
        for token in output_token_ids[self._consumed :]:
            at = self._at.setdefault(token, len(self._at))
            if at == len(self._ids):
                self._grow()
            self._ids[at] = token
            self._counts[at] += 1
        self._consumed = len(output_token_ids)
        n = len(self._at)
        return self._ids[:n], self._counts[:n]

    def _grow(self) -> None:
        more = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more)])


def forbidden_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Last ids of the words whose other ids are the newest of the output."""
    return [w[-1] for w in words if len(w) == 1 or (len(w) <= len(output) + 1 and list(output[1 - len(w) :]) == w[:-1])]


def _too_early(request: Request, position: int) -> list[int]:
    """Ids that would end the request before it has min_tokens."""
    if position >= request.min_tokens:
        return []
    eos = [] if request.ignore_eos else request.eos_token_ids
    return [*request.stop_token_ids, *eos]


def may_edit(request: Request) -> bool:
    """Whether a request's logits are ever edited."""
    p: SamplingParams = request.sampling
    return bool(p.logit_bias or p.bad_words_token_ids or request.min_tokens or has_penalty(p))


def has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


class _Cells:
    """Cells (row, id) of the logits with some float values each, gathered on the host and sent in two copies."""

    def __init__(self, values: int) -> None:
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[list[np.ndarray]] = [[] for _ in range(values)]

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, ids: Sequence[int] | np.ndarray, values: Sequence[Any] = ()) -> None:
        at = np.asarray(ids, dtype=np.int64)
        self._rows.append(np.full(len(at), row, dtype=np.int64))
        self._ids.append(at)
        for mine, new in zip(self._values, values, strict=True):
            mine.append(np.asarray(new, dtype=np.float32))

    def tensors(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """(rows, ids) int64 [N] each, values float32 [values, N]."""
        cells = torch.from_numpy(np.stack([np.concatenate(self._rows), np.concatenate(self._ids)]))
        values = torch.from_numpy(np.array([np.concatenate(v) for v in self._values], dtype=np.float32))
        cells = cells.to(device, non_blocking=True)
        return (cells[0], cells[1]), values.to(device, non_blocking=True)
