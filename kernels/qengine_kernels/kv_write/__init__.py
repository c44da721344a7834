"""Writing computed K and V into a paged cache."""

from __future__ import annotations

from typing import Any

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    storage: torch.Tensor,
    layout: Any,
    slot_mapping: torch.Tensor,
    k_inverse_scale: torch.Tensor,
    v_inverse_scale: torch.Tensor,
    encode: Any,
    native: bool,
) -> None:
    """Store token t's K and V at slot slot_mapping[t], encoded; a negative slot is skipped.

    k, v             [T, Hkv, D] float, any strides but 1 in the last dimension
    storage          uint8 [num_blocks, at least layout.block_bytes]
    layout           where vectors lie in a block (an object with the fields of `qengine.plugin.KVLayout`)
    slot_mapping     int64 [T]: block * block_size + offset
    *_inverse_scale  float32 [Hkv]; values are multiplied by it before `encode(x, NATIVE)`, a Triton device function

    Runs one Triton kernel (on CPU tensors: Triton's interpreter).
    """
    from qengine_kernels.kv_write.kernel import launch_write_kv

    launch_write_kv(k, v, storage, layout, slot_mapping, k_inverse_scale, v_inverse_scale, encode, native)
