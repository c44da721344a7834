"""Rows of the int8 KV dtype: what they mean, how far they round, and Triton beside torch: in its interpreter, or with
`pytest --gpu` on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import triton
from qengine_kv_int8 import Int8KV

from qengine.plugin import AttentionSpec, DeviceInfo, KVLayout
from qengine_kernels.kv_side import CacheSide
from qengine_kernels.kv_write import write_kv
from qengine_kernels.paged_attention import TritonPagedKV, paged_attention_reference

SIZES = [16, 64, 66, 80, 128]
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Where tensors are made."""
    with torch.device(DEVICE):
        yield


def spec(head_dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)


def side(head_dim: int, which: str = "k") -> Int8KV:
    return Int8KV(spec(head_dim), which, torch.float16)


@pytest.mark.parametrize("head_dim", SIZES)
def test_a_value_is_off_by_half_a_step_at_most(head_dim: int) -> None:
    x = torch.randn(50, 2, head_dim) * torch.logspace(-6, 4, 50)[:, None, None]
    x[0, 0] = 0
    kv = side(head_dim)
    rows = kv.encode(x)
    assert rows.shape == (50, 2, kv.layout(16).row) and rows.dtype is torch.int8
    step = x.abs().amax(-1, keepdim=True) / 127
    error = (kv.decode(rows, torch.float32) - x).abs()
    assert (error <= 0.501 * step).all() and (error > 0.25 * step).any()
    assert torch.equal(kv.decode(kv.encode(-x), torch.float32), -kv.decode(rows, torch.float32))
    halved = rows.clone()
    halved[..., 0] //= 2
    assert ((kv.decode(halved, torch.float32) - x).abs() > 0.501 * step).any(), "control"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_vector(bad: float) -> None:
    x = torch.randn(3, 2, 64)
    x[1, 0, 5] = bad
    out = side(64).decode(side(64).encode(x), torch.float32)
    finite = torch.isfinite(out).all(-1)
    assert finite.tolist() == [[True, True], [False, True], [True, True]]


def test_bytes_and_devices() -> None:
    layout = KVLayout.of(16, side(128).layout(16), side(128, "v").layout(16))
    assert layout.block_bytes == 2 * 16 * 2 * 132
    assert side(66).layout(16).row == 68 + 4
    assert side(64).capability(DeviceInfo("cuda", "sm_75", (7, 5))).kind == "native"
    assert not side(64).capability(DeviceInfo("cuda", "sm_70", (7, 0)))
    assert not Int8KV(spec(64), "k", torch.bfloat16).capability(DeviceInfo("cuda", "sm_75", (7, 5)))


@pytest.mark.parametrize("head_dim", SIZES)
def test_triton_stores_what_torch_stores(head_dim: int) -> None:
    kv, block_size, tokens = side(head_dim), 4, 9
    layout = KVLayout.of(block_size, kv.layout(block_size), kv.layout(block_size))
    storage, one = torch.zeros(3, layout.block_bytes, dtype=torch.uint8), torch.ones(2)
    k, v = (torch.randn(tokens, 2, head_dim) * 3 for _ in range(2))
    k[2, 1, 3] = float("nan")
    sides = [CacheSide.of(storage, layout, which, one, kv.functions()) for which in ("k", "v")]
    write_kv(k, v, *sides, torch.arange(tokens) + 2, block_size, False)
    slots = torch.arange(tokens) + 2
    for cache, x in zip(sides, (k, v), strict=True):
        flat = cache.cache[:, : kv.layout(block_size).nbytes].reshape(-1, 2, kv.layout(block_size).row)
        got, want = (kv.decode(rows, torch.float32) for rows in (flat[slots], kv.encode(x)))
        step = x.abs().amax(-1, keepdim=True) / 127
        # Triton may divide a last bit apart, which moves a value that lies between two codes.
        moved = ((got - want).abs() > 0.01 * step) & torch.isfinite(want)
        assert moved.float().mean() < 2e-3
        assert torch.equal(torch.isfinite(got), torch.isfinite(want))


@pytest.mark.parametrize(("head_dim", "route"), [(64, "template"), (80, "gather")])
def test_attention_over_rows(head_dim: int, route: str) -> None:
    """A prompt of 21 tokens and a decode over 30, beside float32 attention over what torch says is stored."""
    kv, own = side(head_dim), spec(head_dim)
    layout, one = KVLayout.of(16, kv.layout(16), kv.layout(16)), torch.ones(2)
    storage = torch.full((5, layout.block_bytes), 255, dtype=torch.uint8)
    tables = torch.tensor([[2, 4], [1, 3]], dtype=torch.int32)
    lens = [30, 21]
    keys, values = (torch.randn(5, 16, 2, head_dim).half() for _ in range(2))
    group = SimpleNamespace(block_tables=tables, slot_mapping=torch.arange(5 * 16))
    batch = SimpleNamespace(
        groups=[group], num_decodes=1, num_seqs=2, host_query_lens=[1, 21], host_seq_lens=lens,
        query_start=torch.tensor([0, 1, 22], dtype=torch.int32), seq_lens=torch.tensor(lens, dtype=torch.int32),
    )  # fmt: skip
    cache = TritonPagedKV(
        storage, layout, own, one, one, kv.functions(), kv.functions(), False, torch.float16, prefill=route
    )
    cache.write(keys.flatten(0, 1), values.flatten(0, 1), batch, 0)
    q = torch.randn(22, 4, head_dim).half()
    got = cache.attend(q, batch, 0).float()
    stored = [kv.decode(kv.encode(x), torch.float32) for x in (keys, values)]
    want = paged_attention_reference(q, *stored, tables, [1, 21], lens, own.scale)
    assert (got - want).norm() / want.norm() < 2e-3
    wrong = paged_attention_reference(q, stored[1], stored[0], tables, [1, 21], lens, own.scale)
    assert (got - wrong).norm() / want.norm() > 0.1
