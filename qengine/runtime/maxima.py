"""Whether the kernels that find the maxima of logits, and with them every greedy token, find the right ones here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qengine_kernels.row_max import row_max
from qengine_kernels.row_max.reference import row_max_reference

RowMax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def wrong_maxima(device: torch.device, vocab_size: int, find: RowMax = row_max) -> str | None:
    """What `find` gives otherwise than plain torch, for rows with ties and rows that are not finite; None: nothing."""
    x = (torch.arange(5 * vocab_size) * 7919 % 10007).float().view(5, vocab_size)
    x[1] = 3.0
    x[2, -1], x[3], x[4, vocab_size // 2] = torch.nan, -torch.inf, torch.inf
    want, places, checked = row_max_reference(x)
    found = [t.cpu() for t in find(x.to(device))]
    if not torch.equal(found[0][:2], want[:2]) or not torch.equal(found[1][:2], places[:2]):
        return f"at {found[1][:2].tolist()} instead of {places[:2].tolist()}"
    if not torch.equal(found[2], checked):
        return f"{found[2].tolist()} instead of {checked.tolist()} in rows that are finite or not"
    if not bool(((found[1] >= 0) & (found[1] < vocab_size)).all()):
        return f"places outside of the vocabulary: {found[1].tolist()}"
    return None
