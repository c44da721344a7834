"""One launch that rotates and writes leaves what two launches leave, in q and in the cache."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from paged_cases import empty_storage
from qengine.plugin import AttentionSpec, KVFunctions, KVLayout, SideLayout
from qengine_dense.kernels import identity_encode
from qengine_kernels.fp8.device import e4m3_encode
from qengine_kernels.kv_side import CacheSide
from qengine_kernels.kv_write import rotate_write_kv, write_kv
from qengine_kernels.rotary.kernel import launch_rotary

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = [16, 47, -1, 3, 30]
# query heads, KV heads, head_dim, half of the dimensions that turn
SHAPES = [(4, 2, 64, 32), (3, 1, 80, 40), (12, 4, 96, 16), (16, 8, 16, 8)]
STEPS = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
"""What one rounding to a dtype may change, relatively."""


def assert_same_values(together: torch.Tensor, apart: torch.Tensor) -> None:
    """A GPU's compiler may fuse products with sums in one kernel and not in the other, so that a value in the middle
    of two is now and then rounded to the other one."""
    dtype = together.dtype
    a, b = together.float(), apart.float()
    torch.testing.assert_close(a, b, rtol=STEPS[dtype], atol=2**-9 if dtype.itemsize == 1 else 1e-6, equal_nan=True)
    if dtype is not torch.float32:
        assert (a == b)[~a.isnan()].float().mean() > 0.99


@pytest.mark.parametrize(("shape", "dtype", "stored"), covering(SHAPES, DTYPES, [None, torch.uint8]))
def test_equals_rotation_and_write(
    shape: tuple[int, int, int, int], dtype: torch.dtype, stored: torch.dtype | None, device: torch.device
) -> None:
    heads, kv_heads, head_dim, half = shape
    spec = AttentionSpec(heads, kv_heads, head_dim, 1.0)
    side = SideLayout.dense(spec, 16, stored or dtype)
    layout = KVLayout.of(16, side, side)
    functions = KVFunctions(identity_encode if stored is None else e4m3_encode, None)
    scales = torch.rand(kv_heads, device=device) + 0.5 if stored else torch.ones(kv_heads, device=device)
    fused = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    angles = torch.rand(len(SLOTS), half, device=device) * 6
    cos, sin, slots = angles.cos(), angles.sin(), torch.tensor(SLOTS, device=device)
    results = []
    for together in (True, False):
        own, storage = fused.clone(), empty_storage(layout, 3, device)
        q, k, v = own[:, :heads], own[:, heads : heads + kv_heads], own[:, heads + kv_heads :]
        sides = [CacheSide.of(storage, layout, name, scales, functions) for name in ("k", "v")]
        if together:
            rotate_write_kv(q, k, v, cos, sin, *sides, slots, 16, False)
        else:
            launch_rotary(q, k, cos, sin)
            write_kv(k, v, *sides, slots, 16, False)
        results.append((q.clone(), storage))
    assert_same_values(results[0][0], results[1][0])
    meaning = dtype if stored is None else torch.float8_e4m3fn
    assert_same_values(results[0][1].view(meaning), results[1][1].view(meaning))
    plain = empty_storage(layout, 3, device)
    write_kv(
        fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :],
        *[CacheSide.of(plain, layout, name, scales, functions) for name in ("k", "v")], slots, 16, False,
    )  # fmt: skip
    assert not torch.equal(results[0][1], plain), "control: keys that were not rotated must differ"
