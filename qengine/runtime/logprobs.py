"""Log-probabilities as the API defines them: raw log-softmax, before any edit, mask or temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine.messages import TokenLogprobs
from qengine.runtime.marker import mark, wait

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


@dataclass
class PendingLogprobs:
    """On their way to the host: int64 [R, 3 + k] (whether the row is broken, the given token's id and rank, the
    likeliest ids) and float32 [R, 1 + k]. `ks`: how many of the k each row asked for."""

    whole: torch.Tensor
    parts: torch.Tensor
    ks: Sequence[int]

    def read(self) -> list[TokenLogprobs | None]:
        """One entry a row; None for a broken one."""
        return [
            None
            if i[0]
            else TokenLogprobs(token_id=i[1], logprob=v[0], rank=i[2], top_ids=i[3 : 3 + n], top_logprobs=v[1 : 1 + n])
            for i, v, n in zip(self.whole.tolist(), self.parts.tolist(), self.ks, strict=True)
        ]


def start_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int] | torch.Tensor, k: int | Sequence[int]
) -> PendingLogprobs:
    """Logprob and rank of one given token a row, and the row's `k` likeliest tokens; waits for nothing.

    logits float32 [R, V]; token_ids [R]; k one number or one a row. A row whose logits hold NaN or +inf, or only -inf,
    is broken. Values are finite: at least LOWEST.
    """
    rows = logits.shape[0]
    ks = [k] * rows if isinstance(k, int) else list(k)
    most = min(max(ks, default=0), logits.shape[1])
    given = token_ids if isinstance(token_ids, torch.Tensor) else torch.tensor(token_ids, dtype=torch.int64)
    ids = given.to(logits.device, non_blocking=True).view(rows, 1)
    chosen = logits.gather(1, ids)
    rank = (logits > chosen).sum(dim=1, keepdim=True) + 1
    top, top_ids = logits.topk(most, dim=1)
    values = torch.cat([chosen, top], dim=1) - logits.logsumexp(dim=1, keepdim=True)
    broken = ~torch.isfinite(logits.amax(dim=1, keepdim=True))
    whole = torch.cat([broken, ids, rank, top_ids], dim=1)
    return PendingLogprobs(
        whole.to("cpu", non_blocking=True), values.clamp(min=LOWEST).to("cpu", non_blocking=True), ks
    )


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int] | torch.Tensor, k: int | Sequence[int]
) -> list[TokenLogprobs | None]:
    """As `start_logprobs`, waiting for the result."""
    pending = start_logprobs(logits, token_ids, k)
    wait(mark(logits.device))
    return pending.read()
