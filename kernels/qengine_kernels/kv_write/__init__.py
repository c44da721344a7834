"""Writing computed K and V into a paged cache."""

from __future__ import annotations

import torch

from qengine_kernels.kv_side import CacheSide


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_side: CacheSide,
    v_side: CacheSide,
    slot_mapping: torch.Tensor,
    block_size: int,
    native: bool,
) -> None:
    """Store token t's K and V at slot slot_mapping[t], encoded; a negative slot is skipped.

    k, v          [T, Hkv, D] float, any strides but 1 in the last dimension
    slot_mapping  int64 [T]: block * block_size + offset
    native        whether the sides' device functions may use hardware conversions

    Runs one Triton kernel (on CPU tensors: Triton's interpreter).
    """
    from qengine_kernels.kv_write.kernel import launch_write_kv

    launch_write_kv(k, v, k_side, v_side, slot_mapping, block_size, native)


def rotate_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_side: CacheSide,
    v_side: CacheSide,
    slot_mapping: torch.Tensor,
    block_size: int,
    native: bool,
) -> None:
    """`qengine_kernels.rotary.rotary_` and `write_kv` in one launch: q [T, H, D] is rotated in place, k as it is stored
    (the tensor itself may stay as it was)."""
    from qengine_kernels.kv_write.rotated import launch_rotate_write

    launch_rotate_write(q, k, v, cos, sin, k_side, v_side, slot_mapping, block_size, native)
