"""Prefill without the attention template: gather, decode, then torch's attention.

On sm_75 Triton's `tl.dot` is plain FMA, while torch's matmuls and scaled_dot_product_attention use the tensor cores.
Prefill is compute-bound, so there the extra copy of one sequence's K and V pays.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

SCORE_BYTES = 64 * 1024 * 1024
"""Largest float32 score block of the explicit path, and largest mask of the other one."""


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    first_position: int,
    low: int,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Causal attention of one sequence's new tokens over its gathered cache, in chunks of queries.

    q     [n, H, D]; query i stands at position first_position + i
    k, v  [Hkv, L, D] dense, in q's dtype: positions low .. low + L - 1
    Returns [n, H, D] in q's dtype.
    """
    n, heads, head_dim = q.shape
    kv_heads, cached, _ = k.shape
    group = heads // kv_heads
    rows = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k[:, None].expand(kv_heads, group, cached, head_dim)
    values = v[:, None].expand(kv_heads, group, cached, head_dim)
    width = cached if soft_cap is None else heads * cached
    chunk = max(16, SCORE_BYTES // (4 * width))
    key_positions = low + torch.arange(cached, device=q.device)
    out = torch.empty_like(q)
    for start in range(0, n, chunk):
        part = rows[:, :, start : start + chunk]
        positions = first_position + torch.arange(start, start + part.shape[2], device=q.device)
        mask = key_positions <= positions[:, None]
        if window is not None:
            mask &= key_positions > positions[:, None] - window
        if soft_cap is None:
            y = F.scaled_dot_product_attention(part, keys, values, attn_mask=mask, scale=scale)
        else:
            # Queries are scaled first: in float16 the bare products can leave its range.
            scores = soft_cap * torch.tanh(((part * scale) @ keys.mT).float() / soft_cap)
            y = scores.masked_fill_(~mask, float("-inf")).softmax(-1).to(q.dtype) @ values
        out[start : start + chunk] = y.permute(2, 0, 1, 3).reshape(-1, heads, head_dim)
    return out
