"""The meaning of `write_kv` in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qengine_kernels.kv_side import side_view


def write_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    storage: torch.Tensor,
    layout: Any,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    k_encode: Callable[[torch.Tensor], torch.Tensor],
    v_encode: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Like `qengine_kernels.kv_write.write_kv`, into uint8 storage as `layout` says (it has the fields of
    `qengine.plugin.KVLayout`), with torch's `encode` of each side and scales that are divided by."""
    for x, scale, side, offset, encode in (
        (k, k_scale, layout.k, layout.k_offset, k_encode),
        (v, v_scale, layout.v, layout.v_offset, v_encode),
    ):
        cache = side_view(storage, side, offset)
        rows = encode(x.float() / scale.float()[:, None])
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            start = slot % layout.block_size * side.token_stride
            for h in range(x.shape[1]):
                at = start + h * side.head_stride
                cache[slot // layout.block_size, at : at + side.row] = rows[t, h]
