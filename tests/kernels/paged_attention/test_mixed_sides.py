"""K and V stored differently, rows with inline scales among them: every path against float32 attention over what each
side's torch functions say was stored."""

from __future__ import annotations

import pytest
import torch

from paged_cases import PagedCase, empty_storage, paged_case
from qengine.layers.attention import KVLayer
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import AttentionSpec, DeviceInfo, KVDtype, KVLayout, KVScales
from qengine_dense.kv import AutoKV
from qengine_kernels.kv_write.reference import write_kv_reference
from qengine_kernels.paged_attention import TritonPagedKV, paged_attention_reference
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV
from row_format import RowKV

KINDS: dict[str, type[KVDtype]] = {"auto": AutoKV, "e4m3": Fp8E4M3KV, "e5m2": Fp8E5M2KV, "rows": RowKV}
PAIRS = ["rows-rows", "rows-e4m3", "auto-rows", "e4m3-auto", "e4m3-e5m2"]
MIXED = ([1, 1, 18, 3], [41, 1, 18, 49])


def sides(pair: str, spec: AttentionSpec, dtype: torch.dtype) -> tuple[KVDtype, KVDtype]:
    k, v = (KINDS[name] for name in pair.split("-"))
    return k(spec, "k", dtype), v(spec, "v", dtype)


def scales(k: KVDtype, v: KVDtype, device: torch.device) -> KVScales:
    """Different for each side and head, where the format takes some."""
    out = KVScales(torch.ones(k.spec.num_kv_heads), torch.ones(k.spec.num_kv_heads))
    if k.max_value is not None:
        out.k = torch.linspace(0.01, 0.06, k.spec.num_kv_heads)
    if v.max_value is not None:
        out.v = torch.linspace(0.08, 0.02, v.spec.num_kv_heads)
    return KVScales(out.k.to(device), out.v.to(device))


def meaning(case: PagedCase, k: KVDtype, v: KVDtype, own: KVScales) -> torch.Tensor:
    """Attention over what the sides' own encode and decode make of K and V, float32."""

    def through(side: KVDtype, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        stored = side.encode(x * (1.0 / scale)[:, None]).to(side.layout(16).dtype)
        return side.decode(stored, torch.float32) * scale[:, None]

    spec, b = k.spec, case.batch
    return paged_attention_reference(
        case.q, through(k, case.keys, own.k), through(v, case.values, own.v), case.tables, b.host_query_lens,
        b.host_seq_lens, spec.scale, spec.sliding_window, spec.soft_cap,
    )  # fmt: skip


def write(cache: KVLayer, case: PagedCase) -> None:
    step = case.batch.groups[0].slot_mapping
    case.batch.groups[0].slot_mapping = case.slots
    cache.write(case.cached(case.keys).to(case.q.dtype), case.cached(case.values).to(case.q.dtype), case.batch, 0)
    case.batch.groups[0].slot_mapping = step
    case.batch.scratch.clear()


@pytest.mark.parametrize(
    ("shape", "window", "pair"),
    [
        *(((4, 2, 64), None, pair) for pair in PAIRS),
        *(((3, 1, 80), 20, pair) for pair in ("rows-e4m3", "auto-rows")),
    ],
    ids=readable_id,
)
@pytest.mark.parametrize("place", ["template", "gather", "cpu"])
def test_every_pair_on_every_path(
    shape: tuple[int, int, int], window: int | None, place: str, pair: str, device: torch.device
) -> None:
    dtype = torch.float32 if place == "cpu" else torch.float16
    where = torch.device("cpu") if place == "cpu" else device
    spec = AttentionSpec(*shape, scale=shape[2] ** -0.5, sliding_window=window)
    case = paged_case(spec, *MIXED, dtype, where)
    k, v = sides(pair, spec, dtype)
    layout, own = KVLayout.of(16, k.layout(16), v.layout(16)), scales(k, v, where)
    storage = empty_storage(layout, len(case.keys), where)
    cache: KVLayer
    if place == "cpu":
        cache = bind_kv_layer(k, v, layout, storage, own, DeviceInfo("cpu"))
    else:
        functions = k.functions(), v.functions()
        cache = TritonPagedKV(
            storage, layout, spec, own.k, own.v, *functions, False, dtype, prefill=place  # type: ignore[arg-type]
        )
    if place == "cpu":
        write(cache, case)
    else:  # the kernel that writes is held to this below, and would take most of the interpreter's time
        keys = case.cached(case.keys) * (1.0 / own.k)[:, None]
        values, one = case.cached(case.values) * (1.0 / own.v)[:, None], torch.ones_like(own.k)
        write_kv_reference(keys, values, storage, layout, case.slots, one, one, k.encode, v.encode)
    with poisoned_empty():
        got = cache.attend(case.q, case.batch, 0).float()
    limit = 1e-4 if place == "cpu" else 2e-3
    assert_close(pair, got, meaning(case, k, v, own), limit)
    case.values = case.values * 1.02
    with pytest.raises(KernelMismatch):
        assert_close("values 2 % larger", got, meaning(case, k, v, own), limit)


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_land_where_the_layout_says(pair: str, device: torch.device) -> None:
    """Bytes of both sides, and none beside them; a negative slot writes nothing."""
    spec = AttentionSpec(3, 3, 80, 1.0)
    k, v = sides(pair, spec, torch.float16)
    layout, one = KVLayout.of(16, k.layout(16), v.layout(16)), torch.ones(3, device=device)
    case = paged_case(spec, [5], [37], torch.float16, device)
    case.slots[3] = -1
    got, want = (empty_storage(layout, len(case.keys), device) for _ in range(2))
    cache = TritonPagedKV(got, layout, spec, one, one, k.functions(), v.functions(), False, torch.float16)
    slots = case.slots.clone()
    case.slots[3] = slots[2]  # a place to read from
    keys, values = (case.cached(t).half() for t in (case.keys, case.values))
    case.batch.groups[0].slot_mapping = slots
    cache.write(keys, values, case.batch, 0)
    write_kv_reference(keys, values, want, layout, slots, one, one, k.encode, v.encode)
    blank = torch.zeros_like(want)
    write_kv_reference(keys, values, blank, layout, slots, one, one, k.encode, v.encode)
    beside = (want == 255) & (blank == 0)
    assert beside.any() and bool((got[beside] == 255).all())
    assert_close("codes", got.float(), want.float(), 2e-3)
    swapped = empty_storage(layout, len(case.keys), device)
    write_kv_reference(values, keys, swapped, layout, slots, one, one, k.encode, v.encode)
    with pytest.raises(KernelMismatch):
        assert_close("K and V swapped", swapped.float(), want.float(), 2e-2)


def test_elementwise_functions_are_refused_for_rows() -> None:
    spec = AttentionSpec(2, 1, 32, 1.0)
    k = RowKV(spec, "k", torch.float16)
    layout, ones = KVLayout.of(16, k.layout(16), k.layout(16)), torch.ones(1)
    storage = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    wrong = Fp8E4M3KV(spec, "k", torch.float16).functions()
    with pytest.raises(ValueError, match=r"row 40, head_dim 32.*store and load"):
        TritonPagedKV(storage, layout, spec, ones, ones, k.functions(), wrong, False, torch.float16)
