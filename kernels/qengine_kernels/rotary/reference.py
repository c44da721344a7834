"""The meaning of `rotary_` in plain torch."""

from __future__ import annotations

import torch


def rotary_reference_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `qengine_kernels.rotary.rotary_`."""
    half = cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    for x in (q, k):
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        low, high = a * c - b * s, b * c + a * s
        x[..., :half] = low
        x[..., half : 2 * half] = high
