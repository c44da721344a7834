"""Whether the kernels that sampling depends on, for every token, give here what plain torch gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qengine_kernels.row_max import row_max
from qengine_kernels.row_max.reference import row_max_reference
from qengine_kernels.top_floor import top_floor
from qengine_kernels.top_floor.reference import top_floor_reference

RowMax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
TopFloor = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


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


def wrong_floors(device: torch.device, vocab_size: int, find: TopFloor = top_floor) -> str | None:
    """What `find` keeps otherwise than plain torch, of values whose shares of top_p are far from rounding; None:
    nothing."""
    places = torch.arange(vocab_size) * 7919 % vocab_size
    x = -places.float() * torch.tensor([0.02, 0.5, 0.01, 3.0, 0.001])[:, None]
    x[2] = (x[2] * 4).round() / 4  # ties
    x -= x.amax(dim=1, keepdim=True)
    rows = torch.tensor([1, 4, 0, 3, 2])
    top_k = torch.tensor([vocab_size, min(2 * vocab_size // 3 + 1, 1000), vocab_size, vocab_size // 2 + 1, vocab_size])
    top_p = torch.tensor([0.5, 1.0, 0.9, 0.95, 0.8])
    floor = torch.tensor([-torch.inf, -torch.inf, -3.01, -torch.inf, -torch.inf])
    want = top_floor_reference(x, x.exp(), rows, vocab_size, top_k, top_p, floor)
    there = [t.to(device) for t in (rows, top_k, top_p, floor)]
    found = find(x.to(device), x.exp().to(device), there[0], vocab_size, *there[1:]).cpu()
    kept, right = ((x[rows] >= low[:, None]).sum(dim=1).tolist() for low in (found, want))
    return None if kept == right else f"{kept} instead of {right} tokens"
