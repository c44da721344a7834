"""Rows of the int4 KV dtype: what they mean, how far they round, and Triton beside torch: in its interpreter, or with
`pytest --gpu` on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import triton
from qengine_kv_int4 import KEY_GROUP, Int4KV

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


def side(head_dim: int, which: str) -> Int4KV:
    return Int4KV(spec(head_dim), which, torch.float16)


def steps(kv: Int4KV, x: torch.Tensor) -> torch.Tensor:
    """A fifteenth of the spread of each value's group, in x's shape; groups are cut here value by value."""
    out = torch.empty_like(x)
    for begin in range(0, x.shape[-1], kv.group):
        part = x[..., begin : begin + kv.group]
        out[..., begin : begin + kv.group] = (part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)) / 15
    return out


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("head_dim", SIZES)
def test_a_value_is_off_by_half_a_step_at_most(head_dim: int, which: str) -> None:
    x = torch.randn(50, 2, head_dim) * torch.logspace(-3, 3, 50)[:, None, None]
    x[0, 0] = 0.5
    kv = side(head_dim, which)
    rows = kv.encode(x)
    assert rows.shape == (50, 2, kv.layout(16).row) and rows.dtype is torch.uint8
    # Beside rounding to a step, scale and zero are rounded to float16.
    allowed = 0.51 * steps(kv, x) + 2e-3 * x.abs().amax(-1, keepdim=True)
    error = (kv.decode(rows, torch.float32) - x).abs()
    assert (error <= allowed).all() and (error > 0.25 * steps(kv, x)).any()
    swapped = rows.clone()
    swapped[..., : kv.code_bytes] = (rows[..., : kv.code_bytes] >> 4) | (rows[..., : kv.code_bytes] << 4)
    assert ((kv.decode(swapped, torch.float32) - x).abs() > allowed).any(), "control: halves of bytes swapped"


def test_a_large_channel_of_keys_harms_its_own_group_only() -> None:
    x = torch.randn(100, 1, 128)
    x[..., 3] = 100
    errors = {}
    for which in ("k", "v"):
        kv = side(128, which)
        errors[which] = (kv.decode(kv.encode(x), torch.float32) - x)[..., KEY_GROUP:].norm()
    assert errors["k"] < errors["v"] / 5


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_vector(bad: float, which: str) -> None:
    x = torch.randn(3, 2, 64)
    x[1, 0, 5] = bad
    out = side(64, which).decode(side(64, which).encode(x), torch.float32)
    finite = torch.isfinite(out).all(-1)
    assert finite.tolist() == [[True, True], [False, True], [True, True]]


def test_bytes_and_devices() -> None:
    layout = KVLayout.of(16, side(128, "k").layout(16), side(128, "v").layout(16))
    assert layout.block_bytes == 16 * 2 * (64 + 16 + 64 + 4)
    assert side(66, "k").layout(16).row == 36 + 3 * 4
    assert side(64, "k").capability(DeviceInfo("cuda", "sm_75", (7, 5))).kind == "native"
    assert not side(64, "k").capability(DeviceInfo("cuda", "sm_70", (7, 0)))
    assert not Int4KV(spec(64), "v", torch.bfloat16).capability(DeviceInfo("cuda", "sm_75", (7, 5)))


@pytest.mark.parametrize("head_dim", SIZES)
def test_triton_stores_what_torch_stores(head_dim: int) -> None:
    pair, block_size, tokens = [side(head_dim, "k"), side(head_dim, "v")], 4, 9
    layout = KVLayout.of(block_size, *(kv.layout(block_size) for kv in pair))
    storage, one = torch.zeros(3, layout.block_bytes, dtype=torch.uint8), torch.ones(2)
    k, v = (torch.randn(tokens, 2, head_dim) * 3 for _ in range(2))
    k[2, 1, 3] = float("nan")
    sides = [CacheSide.of(storage, layout, kv.side, one, kv.functions()) for kv in pair]
    slots = torch.arange(tokens) + 2
    write_kv(k, v, *sides, slots, block_size, False)
    for cache, kv, x in zip(sides, pair, (k, v), strict=True):
        flat = cache.cache[:, : kv.layout(block_size).nbytes].reshape(-1, 2, kv.layout(block_size).row)
        got, want = (kv.decode(rows, torch.float32) for rows in (flat[slots], kv.encode(x)))
        # Triton may divide a last bit apart, which moves a value that lies between two codes.
        moved = ((got - want).abs() > 0.01 * steps(kv, x)) & torch.isfinite(want)
        assert moved.float().mean() < 2e-3
        assert torch.equal(torch.isfinite(got), torch.isfinite(want))


@pytest.mark.parametrize(("head_dim", "route"), [(64, "template"), (80, "gather")])
def test_attention_over_rows(head_dim: int, route: str) -> None:
    """A prompt of 21 tokens and a decode over 30, beside float32 attention over what torch says is stored."""
    pair, own = [side(head_dim, "k"), side(head_dim, "v")], spec(head_dim)
    layout, one = KVLayout.of(16, *(kv.layout(16) for kv in pair)), torch.ones(2)
    storage = torch.full((5, layout.block_bytes), 255, dtype=torch.uint8)
    tables = torch.tensor([[2, 4], [1, 3]], dtype=torch.int32)
    lens = [30, 21]
    keys, values = (torch.randn(5, 16, 2, head_dim).half() for _ in range(2))
    group = SimpleNamespace(block_tables=tables, slot_mapping=torch.arange(5 * 16))
    batch = SimpleNamespace(
        groups=[group], num_decodes=1, num_seqs=2, host_query_lens=[1, 21], host_seq_lens=lens,
        query_start=torch.tensor([0, 1, 22], dtype=torch.int32), seq_lens=torch.tensor(lens, dtype=torch.int32),
    )  # fmt: skip
    functions = [kv.functions() for kv in pair]
    cache = TritonPagedKV(storage, layout, own, one, one, *functions, False, torch.float16, prefill=route)
    cache.write(keys.flatten(0, 1), values.flatten(0, 1), batch, 0)
    q = torch.randn(22, 4, head_dim).half()
    got = cache.attend(q, batch, 0).float()
    stored = [kv.decode(kv.encode(x), torch.float32) for kv, x in zip(pair, (keys, values), strict=True)]
    want = paged_attention_reference(q, *stored, tables, [1, 21], lens, own.scale)
    assert (got - want).norm() / want.norm() < 2e-3
    exact = paged_attention_reference(q, keys, values, tables, [1, 21], lens, own.scale)
    assert 0.02 < (want - exact).norm() / exact.norm() < 0.2
    wrong = paged_attention_reference(q, stored[0].roll(1, -1), stored[1], tables, [1, 21], lens, own.scale)
    assert (got - wrong).norm() / want.norm() > 0.1
