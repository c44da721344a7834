"""The fused CPU kernels beside float32 torch, with wrong controls; and what happens where there is no numba."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from paged_cases import PagedCase, empty_storage, paged_case
from qengine.layers.batch import Batch
from qengine.layers.rotary import RopeAngles
from qengine.plugin import AttentionSpec, KVDtype, KVLayout, SideLayout
from qengine.runtime.cache_dir import cache_root
from qengine_dense.kv import AutoKV
from qengine_kernels import cpu_fused
from qengine_kernels.cpu_attention import CpuPagedKV
from qengine_kernels.cpu_fused import decode, loading, state
from qengine_kernels.cpu_fused.tables import code_table, look_up, value_table
from qengine_kernels.gated_activation import gated_activation
from qengine_kernels.paged_attention import paged_attention_reference
from qengine_kernels.rms_norm.reference import rms_norm_reference
from qengine_kernels.testing import relative_error
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
GQA = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, scale=0.18)
SPECS = {
    "gqa": GQA,
    "mha-d16": AttentionSpec(4, 4, 16, 0.25),
    "mqa-d80": AttentionSpec(5, 1, 80, 0.11),
    "window": dataclasses.replace(GQA, sliding_window=20),
    "window-1": dataclasses.replace(GQA, sliding_window=1),
    "window-soft-cap": dataclasses.replace(GQA, sliding_window=50, soft_cap=1.5),
}
LENS = [90, 3, 16, 17, 1]
KINDS: dict[str, type[KVDtype]] = {"auto": AutoKV, "e4m3": Fp8E4M3KV, "e5m2": Fp8E5M2KV}
SCALES = (torch.tensor([0.037, 0.011]), torch.tensor([0.02, 0.05]))


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    line = cpu_fused.prepare(cache_root() / "cpu-kernels")
    assert cpu_fused.loaded() is not None, line


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(5, 72) * 3).to(dtype), torch.randn(72)
    residual = torch.randn(5, 72)
    sums = residual + x.float()
    for out_dtype in DTYPES:
        assert cpu_fused.takes(x, out_dtype)
        got = cpu_fused.rms_norm(x, weight, 1e-5, out_dtype)
        assert got.dtype is out_dtype
        assert relative_error(got.float(), rms_norm_reference(x.float(), weight, 1e-5)) < TOLERANCE[out_dtype]
        kept = residual.clone()
        got = cpu_fused.rms_norm(x, weight, 1e-5, out_dtype, kept).float()
        assert torch.equal(kept, sums)
        want = rms_norm_reference(sums, weight, 1e-5)
        assert relative_error(got, want) < TOLERANCE[out_dtype]
        assert relative_error(got, want * torch.linspace(1, 1.1, 72)) > 1e-2, "control"
    bad = x.clone()
    bad[2, 7] = float("nan")
    got = cpu_fused.rms_norm(bad, weight, 1e-5, torch.bfloat16)
    assert torch.isfinite(got).all(1).tolist() == [True, True, False, True, True]


def test_norm_of_heads_in_a_slice() -> None:
    """Heads have weights of their own, tokens lie apart: a slice of one projection."""
    qkv, weight = torch.randn(4, 7, 24).to(torch.bfloat16), torch.randn(5, 24)
    x = qkv[:, :5]
    assert cpu_fused.takes(x, torch.float32)
    got = cpu_fused.rms_norm(x, weight, 1e-6, torch.float32)
    want = torch.stack([rms_norm_reference(x[:, h].float(), weight[h], 1e-6) for h in range(5)], 1)
    assert relative_error(got, want) < 2e-6
    assert relative_error(got, want.flip(1)) > 0.1, "control"


@pytest.mark.parametrize("kind", cpu_fused.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activation(kind: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 77) * 4).to(dtype)
    x[0, :6] = torch.tensor([-200.0, 200.0, 0.0, -20.0, 1e-6, 90.0]).to(dtype)
    got = cpu_fused.gated_activation(x, kind)
    want = gated_activation(x.float(), kind)
    assert got.dtype is dtype and relative_error(got.float(), want) < TOLERANCE[dtype]
    assert relative_error(got.float(), gated_activation(x.float().roll(77, 1), kind)) > 0.1, "control"
    x[1, 5] = float("nan")
    bad = cpu_fused.gated_activation(x, kind)
    assert torch.isnan(bad[1, 5]) and torch.isfinite(bad).sum() == bad.numel() - 1


def test_results_are_rounded_to_the_nearest_bfloat16() -> None:
    """Ties to even, up to infinity: the norm of ones is the weight."""
    bits = torch.arange(0, 1 << 32, 65521).sub(1 << 31).to(torch.int32)
    weight = torch.cat([bits, torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32)]).view(torch.float32)
    got = cpu_fused.rms_norm(torch.ones(1, len(weight)), weight, 0.0, torch.bfloat16)[0]
    want = weight.to(torch.bfloat16)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan) and torch.equal(got[~nan], want[~nan])
    cut = (weight.view(torch.int32) >> 16 << 16).view(torch.float32).to(torch.bfloat16)
    assert not torch.equal(got[~nan], cut[~nan]), "control"


@pytest.mark.parametrize("plugin", [Fp8E4M3KV, Fp8E5M2KV])
def test_tables_code_as_the_format_does(plugin: type[KVDtype]) -> None:
    """Every bfloat16 and what lies beside it, ties of the format and their neighbours, NaN and infinities."""
    own = plugin(GQA, "k", torch.bfloat16)
    codes, values = code_table(own.encode, 32), value_table(lambda c: own.decode(c, torch.float32), 32)
    every = torch.arange(256).to(torch.uint8)
    torch.testing.assert_close(values, own.decode(every, torch.float32), rtol=0, atol=0, equal_nan=True)
    finite = values[torch.isfinite(values)].sort().values
    ties = (finite[1:].double() + finite[:-1].double()).div(2).float()
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    beside = (upper[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF])).flatten().int()
    x = torch.cat([ties, finite, beside.view(torch.float32)])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))])
    x = torch.cat([x, torch.randint(-(1 << 31), 1 << 31, (200_000,)).int().view(torch.float32)])
    assert torch.equal(look_up(codes, x), own.encode(x))
    truncating = codes | torch.tensor(0xFFFF << 16).int()
    assert not torch.equal(look_up(truncating, x), own.encode(x)), "control"


def angles(positions: torch.Tensor, rotary_dim: int) -> RopeAngles:
    freqs = positions.float()[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    cos, sin = freqs.cos(), freqs.sin()
    return RopeAngles(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def rotated(x: torch.Tensor, turn: RopeAngles) -> torch.Tensor:
    r = turn.cos.shape[-1]
    head = x[..., :r] * turn.cos + x[..., :r].roll(r // 2, -1) * turn.sin
    return torch.cat((head, x[..., r:]), -1)


def both(plugin: type[KVDtype], spec: AttentionSpec, dtype: torch.dtype, head_major: bool = False) -> KVLayout:
    side = plugin(spec, "k", dtype).layout(16)
    if head_major:
        side = SideLayout(side.dtype, side.nbytes, side.row, 16 * side.row, side.row)
    return KVLayout.of(16, side, side)


@dataclasses.dataclass
class Decoded:
    """What one decode step gave, and what plain float32 says over the same stored bytes."""

    got: torch.Tensor
    want: torch.Tensor
    control: torch.Tensor
    new: torch.Tensor
    new_want: torch.Tensor
    case: PagedCase


def decoded(
    plugin: type[KVDtype], spec: AttentionSpec, dtype: torch.dtype, *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None, rotary_dim: int | None = None, head_major: bool = False,
    spoil: int | None = None,
) -> Decoded:  # fmt: skip
    """Older tokens are written by torch, the newest by the fused call; slots of nobody hold 0xFF."""
    heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    k_scale, v_scale = scales or (torch.ones(kv), torch.ones(kv))
    case = paged_case(spec, [1] * len(LENS), LENS, dtype, torch.device("cpu"))
    batch, layout = case.batch, both(plugin, spec, dtype, head_major)
    storage = empty_storage(layout, len(case.keys), torch.device("cpu"))
    formats = plugin(spec, "k", dtype), plugin(spec, "v", dtype)
    cache = CpuPagedKV(storage, layout, spec, k_scale, v_scale, *formats, together=True)
    cache.write(case.cached(case.keys), case.cached(case.values), slots_of(batch, case.slots), 0)
    qkv = torch.randn(len(LENS), heads + 2 * kv, dim).to(dtype)
    if spoil is not None:
        qkv[spoil, heads:] = float("nan")
    turn = angles(batch.positions, dim if rotary_dim is None else rotary_dim)
    qk, v = rotated(qkv[:, : heads + kv].float(), turn), qkv[:, heads + kv :].float()
    keys, values = reread(formats[0], case.keys, k_scale), reread(formats[1], case.values, v_scale)
    slots = batch.groups[0].slot_mapping
    new_want = torch.stack([reread(formats[0], qk[:, heads:], k_scale), reread(formats[1], v, v_scale)])
    keys.view(-1, kv, dim)[slots], values.view(-1, kv, dim)[slots] = new_want
    rules = (case.tables, batch.host_query_lens, batch.host_seq_lens)

    def attend(scale: float, window: int | None) -> torch.Tensor:
        return paged_attention_reference(qk[:, :heads], keys, values, *rules, scale, window, spec.soft_cap).flatten(1)

    got = cache.decode(qkv[:, : heads + kv], qkv[:, heads + kv :], turn, batch, 0, dtype)
    assert got is not None and got.dtype is dtype
    sides = [m.view(storage, s.dtype) for m, s in zip(cache.maps, cache.sides, strict=True)]
    rows = cache.maps[0].rows(slots // 16, slots % 16)
    stored = formats[0].decode(sides[0][rows].view(2, len(LENS), kv, dim), torch.float32)
    new = stored * torch.stack([k_scale, v_scale])[:, None, :, None]
    window = None if spec.sliding_window is None else spec.sliding_window + 1
    return Decoded(
        got.float(), attend(spec.scale, spec.sliding_window), attend(spec.scale * 1.3, window), new, new_want, case
    )


def slots_of(batch: Batch, slots: torch.Tensor) -> Batch:
    return dataclasses.replace(batch, groups=[dataclasses.replace(batch.groups[0], slot_mapping=slots)], scratch={})


def reread(own: KVDtype, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., heads, dim] as the cache means it."""
    stored = own.encode(x.float() * (1.0 / scale)[:, None]).to(own.layout(16).dtype)
    return own.decode(stored, torch.float32) * scale[:, None]


@pytest.mark.parametrize("name", SPECS)
def test_decode_in_float32(name: str) -> None:
    d = decoded(AutoKV, SPECS[name], torch.float32)
    assert relative_error(d.got, d.want) < 2e-6
    assert relative_error(d.new, d.new_want) < 1e-6
    assert relative_error(d.got, d.control) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_of_formats_with_scales(kind: str, dtype: torch.dtype) -> None:
    """bfloat16 results are rounded once; codes may differ where rotation's last bit moves a value over a tie."""
    d = decoded(KINDS[kind], GQA, dtype, scales=None if kind == "auto" else SCALES, rotary_dim=16, head_major=True)
    assert relative_error(d.got, d.want) < {torch.float32: 1e-3, torch.bfloat16: 4e-3}[dtype]
    assert ((d.new - d.new_want).abs() > 1e-6 * d.new_want.abs()).float().mean() < 0.01
    assert relative_error(d.got, d.control) > 1e-2
    assert relative_error(d.new, d.new_want.flip(0)) > 0.1, "control: K for V"


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_sequence_stays_alone(kind: str) -> None:
    d = decoded(KINDS[kind], GQA, torch.bfloat16, spoil=2)
    finite = torch.isfinite(d.got)
    assert finite.any(1).tolist() == finite.all(1).tolist() == [True, True, False, True, True]


def test_steps_that_are_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, layout = GQA, both(AutoKV, GQA, torch.bfloat16)
    side = AutoKV(spec, "k", torch.bfloat16)
    storage, one = torch.zeros(4, layout.block_bytes, dtype=torch.uint8), torch.ones(2)
    own = decode.FusedDecode.of(storage, layout, spec, (side, side), (one, one))
    assert own is not None
    x, half = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, dtype=torch.float16)
    few = paged_case(spec, [1, 1], [4, 5], torch.bfloat16, torch.device("cpu")).batch
    mixed = paged_case(spec, [1, 3], [4, 5], torch.bfloat16, torch.device("cpu")).batch
    many = dataclasses.replace(few, num_tokens=100, num_decodes=100)
    assert own.takes(few, x, x, torch.bfloat16)
    assert own.takes(many, x, x, torch.bfloat16) and not own.takes(mixed, x, x, torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert own.takes(few, x, x, torch.bfloat16) and not own.takes(many, x, x, torch.bfloat16)
    assert not own.takes(few, half, half, torch.float16)
    for other, dtype in ((AutoKV, torch.float16), (Longer, torch.float32), (Distinct, torch.float32)):
        side, layout = other(spec, "k", dtype), both(other, spec, dtype)
        assert decode.FusedDecode.of(storage, layout, spec, (side, side), (one, one)) is None
    side, layout = Untrue(spec, "k", torch.float32), both(Untrue, spec, torch.float32)
    with pytest.raises(ValueError, match="Untrue says `elementwise`"):
        decode.FusedDecode.of(storage, layout, spec, (side, side), (one, one))
    monkeypatch.setattr(state, "_loaded", None)
    assert not own.takes(few, x, x, torch.bfloat16) and not cpu_fused.takes(x[0], torch.bfloat16)


class Longer(AutoKV):
    def layout(self, block_size: int) -> SideLayout:
        return SideLayout.dense(self.spec, block_size, torch.float32, self.spec.head_dim + 1)


class Distinct(Fp8E4M3KV):
    elementwise = False


class Untrue(Fp8E4M3KV):
    """Codes depend on the place in the vector."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x * torch.linspace(1, 2, x.shape[-1]))


def test_without_numba_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    loaded = loading.compile_kernels(None)
    assert loaded.kernels is None and loaded.line.startswith("Fused CPU kernels: none") and "numba" in loaded.line


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_compiled", lambda njit, cache: cache)
    (tmp_path / "file").write_text("")
    assert loading.compile_kernels(tmp_path / "file").kernels is False
    assert "compiled; the cache can't be written" in loading.compile_kernels(tmp_path / "file").line
    good = loading.compile_kernels(tmp_path)
    assert good.kernels is True and "(compiled)" in good.line and any(tmp_path.iterdir())
