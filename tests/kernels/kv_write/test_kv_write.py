"""Cache writes land at the right bytes, and only there."""

from __future__ import annotations

import pytest
import torch

from paged_cases import empty_storage
from qengine.plugin import AttentionSpec, KVFunctions, KVLayout, SideLayout
from qengine_dense.kernels import identity_encode
from qengine_kernels.fp8.device import e4m3_encode
from qengine_kernels.kv_side import CacheSide
from qengine_kernels.kv_write import write_kv
from qengine_kernels.kv_write.reference import write_kv_reference
from qengine_kernels.testing import readable_id

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
SLOTS = [16, 47, -1, 3, 30]


def dense(heads: int, head_dim: int, dtype: torch.dtype) -> KVLayout:
    side = SideLayout.dense(AttentionSpec(heads, heads, head_dim, 1.0), 16, dtype)
    return KVLayout.of(16, side, side)


def write(
    k: torch.Tensor, v: torch.Tensor, storage: torch.Tensor, layout: KVLayout, slots: torch.Tensor,
    k_scale: torch.Tensor, v_scale: torch.Tensor, encode: object, native: bool = False,
) -> None:  # fmt: skip
    functions = KVFunctions(encode, None)
    sides = [CacheSide.of(storage, layout, n, s, functions) for n, s in (("k", k_scale), ("v", v_scale))]
    write_kv(k, v, *sides, slots, layout.block_size, native)


def inputs(
    heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v as views of a fused qkv, and their slots (-1: a padded row that is not written)."""
    fused = torch.randn(len(SLOTS), 3 * heads, head_dim).to(dtype).to(device)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    return k, v, torch.tensor(SLOTS, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (1, 80), (3, 96), (5, 256), (8, 16)])
def test_dense_is_bit_exact(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    layout = dense(heads, head_dim, dtype)
    k, v, slots = inputs(heads, head_dim, dtype, device)
    got, want = empty_storage(layout, 3, device), empty_storage(layout, 3, device)
    ones = torch.ones(heads, device=device)
    write(k, v, got, layout, slots, ones, ones, identity_encode)
    write_kv_reference(k, v, want, layout, slots, ones, ones, *[lambda x: x.to(dtype)] * 2)
    assert torch.equal(got, want)
    swapped = empty_storage(layout, 3, device)
    write_kv_reference(v, k, swapped, layout, slots, ones, ones, *[lambda x: x.to(dtype)] * 2)
    assert not torch.equal(got, swapped), "control: k and v swapped must differ"


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
def test_fp8_with_head_scales(dtype: torch.dtype, native: bool, device: torch.device) -> None:
    """Powers of two as scales, so that dividing and multiplying by the reciprocal are the same."""
    layout = dense(3, 80, torch.uint8)
    k, v, slots = inputs(3, 80, dtype, device)
    k_scale, v_scale = torch.tensor([0.5, 4.0, 2**-9], device=device), torch.tensor([1.0, 0.25, 8.0], device=device)
    got, want = empty_storage(layout, 3, device), empty_storage(layout, 3, device)
    write(k, v, got, layout, slots, k_scale, v_scale, e4m3_encode, native)

    def encode(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    write_kv_reference(k, v, want, layout, slots, k_scale, v_scale, encode, encode)
    assert torch.equal(got, want)
    unscaled = empty_storage(layout, 3, device)
    write_kv_reference(k, v, unscaled, layout, slots, 1 / k_scale, v_scale, encode, encode)
    assert not torch.equal(got, unscaled), "control: an inverted scale must differ"


def test_strides_of_another_layout(device: torch.device) -> None:
    """Head-major blocks with gaps, as a plugin may lay them out; the gaps stay as they were."""
    side = SideLayout(torch.float16, 800, token_stride=40, head_stride=200, row=32)
    layout = KVLayout(block_size=4, block_bytes=2400, k=side, v=side, k_offset=16, v_offset=1008)
    k, v, slots = inputs(2, 32, torch.float16, device)
    slots = torch.tensor([4, 11, -1, 5, 2], device=device)
    got, want = empty_storage(layout, 3, device), empty_storage(layout, 3, device)
    ones = torch.ones(2, device=device)
    write(k, v, got, layout, slots, ones, ones, identity_encode)
    write_kv_reference(k, v, want, layout, slots, ones, ones, *[lambda x: x.half()] * 2)
    assert torch.equal(got, want)


def test_no_tokens_is_no_launch(device: torch.device) -> None:
    layout = dense(2, 32, torch.float16)
    storage = empty_storage(layout, 2, device)
    before, none = storage.clone(), torch.zeros(0, 2, 32, dtype=torch.float16, device=device)
    ones = torch.ones(2, device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    write(none, none, storage, layout, slots, ones, ones, identity_encode)
    assert torch.equal(storage, before)
