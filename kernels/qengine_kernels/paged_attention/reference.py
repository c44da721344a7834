"""The meaning of paged attention in plain torch, float32."""

from __future__ import annotations

import torch


def paged_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """q [T, H, D]; k, v [num_blocks, block_size, Hkv, D], decoded and scaled -> float32 [T, H, D].

    Sequence i's tokens 0 .. seq_lens[i] - 1 lie at block_tables[i]; its last query_lens[i] tokens are the queries,
    each of which sees the cached tokens up to its own (the last `window` of them).
    """
    block_size, kv_heads = k.shape[1], k.shape[2]
    group = q.shape[1] // kv_heads
    out, start = [], 0
    for table, n, cached in zip(block_tables, query_lens, seq_lens, strict=True):
        position = torch.arange(cached, device=q.device)
        block, offset = table.long()[position // block_size], position % block_size
        keys = k[block, offset].float().repeat_interleave(group, dim=1)
        values = v[block, offset].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,nhd->hqn", q[start : start + n].float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_position = position[cached - n :, None]
        visible = position <= query_position
        if window is not None:
            visible &= position > query_position - window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqn,nhd->qhd", weights, values))
        start += n
    return torch.cat(out)
