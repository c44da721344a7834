"""The meaning of `write_kv` in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def write_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    storage: torch.Tensor,
    layout: Any,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    encode: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Like `qengine_kernels.kv_write.write_kv`, with a torch `encode` and scales that are divided by."""
    cache = storage.view(layout.dtype)
    for x, scale, offset in ((k, k_scale, layout.k_offset), (v, v_scale, layout.v_offset)):
        rows = encode(x.float() / scale.float()[:, None])
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            start = offset + (slot % layout.block_size) * layout.token_stride
            for h in range(x.shape[1]):
                at = start + h * layout.head_stride
                cache[slot // layout.block_size, at : at + layout.row] = rows[t, h]
