"""Log-probabilities as the API defines them: raw log-softmax, before any edit, mask or temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qengine.messages import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int] | torch.Tensor, k: int | Sequence[int]
) -> list[TokenLogprobs | None]:
    """Logprob and rank of one given token a row, and the row's `k` likeliest tokens.

    logits float32 [R, V]; token_ids [R]; k one number or one a row. A row whose logits hold NaN or +inf, or only -inf,
    gives None. Values are finite: at least LOWEST. Nothing waits for the device before the final copies.
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
    whole = torch.cat([broken, ids, rank, top_ids], dim=1).tolist()
    parts = values.clamp(min=LOWEST).tolist()
    return [
        None
        if i[0]
        else TokenLogprobs(token_id=i[1], logprob=v[0], rank=i[2], top_ids=i[3 : 3 + n], top_logprobs=v[1 : 1 + n])
        for i, v, n in zip(whole, parts, ks, strict=True)
    ]
