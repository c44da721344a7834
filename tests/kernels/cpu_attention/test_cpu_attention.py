"""CpuPagedKV against plain float32 attention: every kind of step, layout and format, with wrong controls."""

import dataclasses

import pytest
import torch

from paged_cases import PagedCase, empty_storage, paged_case
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import AttentionSpec, DeviceInfo, KVDtype, KVLayout, KVScales, SideLayout
from qengine_dense.kv import AutoKV
from qengine_kernels.cpu_attention import CpuPagedKV, plan
from qengine_kernels.paged_attention import paged_attention_reference
from qengine_kernels.testing import relative_error
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV

CPU = torch.device("cpu")
GQA = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, scale=0.18)
SPECS = {
    "gqa": GQA,
    "mha-d16": AttentionSpec(4, 4, 16, 0.25),
    "mqa-d256": AttentionSpec(4, 1, 256, 0.0625),
    "window": dataclasses.replace(GQA, sliding_window=20),
    "window-1": dataclasses.replace(GQA, sliding_window=1),
    "soft-cap": dataclasses.replace(GQA, soft_cap=1.5),
    "window-soft-cap": dataclasses.replace(GQA, sliding_window=9, soft_cap=1.5),
}
STEPS = {
    "one-decode": ([1], [37]),
    "first-token": ([1], [1]),
    "decodes": ([1, 1, 1, 1, 1, 1], [90, 3, 16, 17, 88, 1]),
    "equal-decodes": ([1, 1, 1], [33, 33, 33]),
    "prompt": ([21], [21]),
    "chunk": ([7], [40]),
    "block-edges": ([16, 16, 1 + 16], [16, 32, 48 + 17]),
    "mixed": ([1, 1, 5, 30, 2], [70, 12, 21, 30, 18]),
}
KINDS: dict[str, type[KVDtype]] = {"auto": AutoKV, "e4m3": Fp8E4M3KV, "e5m2": Fp8E5M2KV}


def both(plugin: type[KVDtype], spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> KVLayout:
    return KVLayout.of(block_size, *(plugin(spec, side, dtype).layout(block_size) for side in ("k", "v")))


def dense(spec: AttentionSpec, block_size: int, dtype: torch.dtype, row: int | None = None) -> KVLayout:
    side = SideLayout.dense(spec, block_size, dtype, row)
    return KVLayout.of(block_size, side, side)



def scales(kind: str, heads: int) -> KVScales:
    if kind == "one":
        return KVScales(torch.ones(heads), torch.ones(heads))
    if kind == "tensor":
        return KVScales(torch.full((heads,), 0.037), torch.full((heads,), 0.011))
    return KVScales(torch.linspace(0.01, 0.06, heads), torch.linspace(0.05, 0.02, heads))


def run(
    case: PagedCase, spec: AttentionSpec, plugin: type[KVDtype], s: KVScales, layout: KVLayout, spare: int = 0
) -> torch.Tensor:
    """Older tokens are written in one step, this step's by its own write; unwritten bytes are NaN codes."""
    storage = empty_storage(dataclasses.replace(layout, block_bytes=layout.block_bytes + spare), len(case.keys), CPU)
    k_side, v_side = plugin(spec, "k", case.q.dtype), plugin(spec, "v", case.q.dtype)
    cache = bind_kv_layer(k_side, v_side, layout, storage, s, DeviceInfo("cpu"))
    assert isinstance(cache, CpuPagedKV)
    k, v = (case.cached(t).to(case.q.dtype) for t in (case.keys, case.values))
    new = torch.isin(case.slots, case.batch.groups[0].slot_mapping)
    old = dataclasses.replace(
        case.batch, groups=[dataclasses.replace(case.batch.groups[0], slot_mapping=case.slots[~new])], scratch={}
    )
    cache.write(k[~new], v[~new], old, 0)
    cache.write(k[new], v[new], case.batch, 0)
    out = cache.attend(case.q, case.batch, 0)
    again = cache.attend(case.q, case.batch, 0)  # with the step's memo
    torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)
    return out


def expected(
    case: PagedCase, spec: AttentionSpec, kind: type[KVDtype], s: KVScales, dtype: torch.dtype
) -> torch.Tensor:
    """float32, with what the format makes of K and V."""
    plugin = kind(spec, "k", dtype)

    def through(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        stored = plugin.encode(x * (1.0 / scale)[:, None])
        return plugin.decode(stored.to(plugin.layout(16).dtype), torch.float32) * scale[:, None]

    k, v = through(case.keys, s.k), through(case.values, s.v)
    return reference(case, spec, k, v)


def reference(case: PagedCase, spec: AttentionSpec, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b = case.batch
    return paged_attention_reference(
        case.q, k, v, case.tables, b.host_query_lens, b.host_seq_lens, spec.scale, spec.sliding_window, spec.soft_cap
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SPECS)
def test_every_step_and_rule_in_float32(name: str, step: str) -> None:
    spec, plugin, one = SPECS[name], AutoKV, scales("one", SPECS[name].num_kv_heads)
    case = paged_case(spec, *STEPS[step], torch.float32, CPU)
    got = run(case, spec, plugin, one, both(plugin, spec, 16, torch.float32))
    assert relative_error(got, reference(case, spec, case.keys, case.values)) < 2e-6
    if step == "first-token" or (name == "window-1" and "decodes" not in step):
        return  # one visible token: the output is its V whatever the scale
    control = dataclasses.replace(spec, scale=spec.scale * 1.3, sliding_window=19 if spec.sliding_window else None)
    assert relative_error(got, reference(case, control, case.keys, case.values)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["one", "tensor", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_formats_and_scales(kind: str, granularity: str, dtype: torch.dtype) -> None:
    spec, plugin = GQA, KINDS[kind]
    s = scales(granularity, spec.num_kv_heads)
    case = paged_case(spec, *STEPS["mixed"], dtype, CPU)
    got = run(case, spec, plugin, s, both(plugin, spec, 16, dtype)).float()
    if kind == "auto":
        if granularity != "one":
            return  # takes no scales
        want = reference(case, spec, case.keys, case.values)
        assert relative_error(got, want) < (2e-6 if dtype is torch.float32 else 4e-3)
        return
    want = expected(case, spec, plugin, s, dtype)
    assert relative_error(got, want) < (2e-6 if dtype is torch.float32 else 4e-3)
    exact = reference(case, spec, case.keys, case.values)
    assert relative_error(got, exact) < {"e4m3": 0.05, "e5m2": 0.1}[kind]
    for control in (KVScales(s.v * 1.5, s.k * 1.5), KVScales(s.k, s.v.flip(0) * 1.5)):
        swapped = reference(
            case, spec, case.keys * (control.k / s.k)[:, None], case.values * (control.v / s.v)[:, None]
        )
        assert relative_error(got, swapped) > 0.1


def test_queries_keep_dtype_and_take_views() -> None:
    """q, k and v come as slices of one projection."""
    spec = GQA
    case = paged_case(spec, *STEPS["mixed"], torch.bfloat16, CPU)
    wide = torch.cat([case.q, torch.zeros_like(case.q)], dim=1)
    case.q = wide[:, : spec.num_heads]
    got = run(case, spec, AutoKV, scales("one", 2), dense(spec, 16, torch.bfloat16))
    assert got.dtype is torch.bfloat16 and got.shape == case.q.shape
    assert relative_error(got.float(), reference(case, spec, case.keys, case.values)) < 4e-3


def head_major(spec: AttentionSpec, block_size: int, dtype: torch.dtype, row: int) -> KVLayout:
    """[Hkv, block_size, row] for K, the same for V, then a few spare bytes: a layout of another kind."""
    half = spec.num_kv_heads * block_size * row
    side = SideLayout(dtype, half * dtype.itemsize, row, block_size * row, row)
    layout = KVLayout.of(block_size, side, side)
    return dataclasses.replace(layout, block_bytes=layout.block_bytes + 32)


class InlineScaleKV(AutoKV):
    """float32 values scaled by their vector's largest, which lies behind them: rows longer than head_dim."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        top = x.abs().amax(-1, keepdim=True)
        return torch.cat([x / top, top], dim=-1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (rows[..., :-1] * rows[..., -1:]).to(dtype)


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_other_layouts(block_size: int) -> None:
    """Head-major blocks, rows with inline scales, and storage wider than the layout."""
    case = paged_case(GQA, *STEPS["mixed"], torch.float32, CPU, block_size=block_size)
    want = reference(case, GQA, case.keys, case.values)
    one = scales("one", 2)
    longer = dense(GQA, block_size, torch.float32, 33)
    for plugin, layout, spare in (
        (AutoKV, head_major(GQA, block_size, torch.float32, 32), 0),
        (AutoKV, dense(GQA, block_size, torch.float32), 4 * 20),
        (InlineScaleKV, longer, 0),
        (InlineScaleKV, head_major(GQA, block_size, torch.float32, 33), 0),
    ):
        assert relative_error(run(case, GQA, plugin, one, layout, spare), want) < 2e-6


@pytest.mark.parametrize("elements", [1, 64 * 40, 1 << 30])
@pytest.mark.parametrize("padding", [0.0, 0.75, 1.0])
def test_batching_of_decodes_changes_nothing(elements: int, padding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "DECODE_ELEMENTS", elements)
    monkeypatch.setattr(plan, "PADDING", padding)
    case = paged_case(GQA, *STEPS["decodes"], torch.float32, CPU)
    got = run(case, GQA, Fp8E4M3KV, scales("head", 2), both(Fp8E4M3KV, GQA, 16, torch.float32))
    assert relative_error(got, expected(case, GQA, Fp8E4M3KV, scales("head", 2), torch.float32)) < 2e-6


def test_long_prompts_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "QUERY_TILE", 8)
    monkeypatch.setattr(plan, "SCORE_ELEMENTS", 6 * 30 * 5)
    for name in ("gqa", "window", "soft-cap", "window-soft-cap"):
        case = paged_case(SPECS[name], [30, 25], [30, 60], torch.float32, CPU)
        got = run(case, SPECS[name], AutoKV, scales("one", 2), dense(GQA, 16, torch.float32))
        assert relative_error(got, reference(case, SPECS[name], case.keys, case.values)) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gqa", "window", "soft-cap"])
def test_a_bad_sequence_stays_alone(kind: str, name: str) -> None:
    """NaN and infinity in one sequence's K and V reach that sequence's rows only, and do reach them."""
    spec, plugin = SPECS[name], KINDS[kind]
    layout = both(plugin, spec, 16, torch.float32)
    case = paged_case(spec, *STEPS["mixed"], torch.float32, CPU)
    one = scales("one", 2)
    clean = run(case, spec, plugin, one, layout)
    for bad in (0, 3):
        last = case.batch.host_seq_lens[bad] - 1
        block = int(case.tables[bad, last // 16])
        spoilt = dataclasses.replace(
            case, keys=case.keys.clone(), values=case.values.clone(), batch=dataclasses.replace(case.batch, scratch={})
        )
        spoilt.keys[block, last % 16] = float("nan")
        spoilt.values[block, last % 16] = float("nan")
        got = run(spoilt, spec, plugin, one, layout)
        start = case.batch.query_start.tolist()
        mine = slice(start[bad], start[bad + 1])
        assert not torch.isfinite(got[mine][-1]).any()
        others = torch.ones(len(got), dtype=torch.bool)
        others[mine] = False
        assert torch.equal(got[others], clean[others])


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    case = paged_case(GQA, *STEPS["decodes"], torch.float32, CPU)
    try:
        torch.set_num_threads(2)
        got = run(case, GQA, AutoKV, scales("one", 2), dense(GQA, 16, torch.float32))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert relative_error(got, reference(case, GQA, case.keys, case.values)) < 2e-6
