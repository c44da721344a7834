"""Paged attention against float32 torch: decode, prefill, chunked and mixed steps, every masking rule."""

from __future__ import annotations

import pytest
import torch

from paged_cases import PagedCase, empty_storage, paged_case
from qengine.plugin import AttentionSpec, KVFunctions, KVLayout, SideLayout
from qengine_dense.kernels import identity_decode, identity_encode
from qengine_kernels.fp8.device import e4m3_decode, e4m3_encode, e4m3_pairs, e5m2_decode, e5m2_encode, e5m2_pairs
from qengine_kernels.kv_write.reference import write_kv_reference
from qengine_kernels.launch import Chip
from qengine_kernels.paged_attention import TritonPagedKV, paged_attention_reference
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id

DENSE = KVFunctions(identity_encode, identity_decode)
E4M3 = KVFunctions(e4m3_encode, e4m3_decode, e4m3_pairs)
E5M2 = KVFunctions(e5m2_encode, e5m2_decode, e5m2_pairs)
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# heads, KV heads, head_dim; the last has more heads for one KV head than a tile has rows
SHAPES = [(4, 2, 64), (3, 1, 80), (9, 3, 96), (2, 2, 16), (7, 1, 128), (2, 1, 256), (37, 1, 16)]
# query lengths, cached tokens (these included)
STEPS = {
    "decode": ([1, 1, 1], [1, 37, 80]),
    "prefill": ([5, 33], [5, 33]),
    "chunk": ([7, 20], [50, 21]),
    "mixed": ([1, 1, 18, 3], [41, 1, 18, 49]),
}


def spec_of(shape: tuple[int, int, int], window: int | None = None, cap: float | None = None) -> AttentionSpec:
    return AttentionSpec(*shape, scale=shape[2] ** -0.5, sliding_window=window, soft_cap=cap)


def reference(case: PagedCase, spec: AttentionSpec, **changes: object) -> torch.Tensor:
    rules = {"scale": spec.scale, "window": spec.sliding_window, "soft_cap": spec.soft_cap} | changes
    lens = case.batch.host_query_lens, case.batch.host_seq_lens
    return paged_attention_reference(case.q, case.keys, case.values, case.tables, *lens, **rules)  # type: ignore[arg-type]


def filled(
    case: PagedCase,
    spec: AttentionSpec,
    functions: KVFunctions = DENSE,
    stored: torch.dtype | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    native: bool = False,
    **options: object,
) -> TritonPagedKV:
    """A cache that holds the case's K and V, written in plain torch: the kernel that writes has tests of its own, and
    would take most of the interpreter's time."""
    dtype, device = case.q.dtype, case.q.device
    side = SideLayout.dense(spec, case.batch.block_size, stored or dtype)
    layout = KVLayout.of(case.batch.block_size, side, side)
    storage = empty_storage(layout, len(case.keys), device)
    ones = torch.ones(spec.num_kv_heads, device=device)
    k_scale, v_scale = scales or (ones, ones)
    cache = TritonPagedKV(
        storage, layout, spec, k_scale, v_scale, functions, functions, native, dtype, **options  # type: ignore[arg-type]
    )
    keys, values = case.cached(case.keys), case.cached(case.values)
    write_kv_reference(
        keys, values, storage, layout, case.slots, k_scale, v_scale, *[lambda x: encoded(x, functions, dtype)] * 2
    )
    return cache


def encoded(x: torch.Tensor, functions: KVFunctions, dtype: torch.dtype) -> torch.Tensor:
    """Codes of a format, saturated; float8 as bytes."""
    if functions is DENSE:
        return x.to(dtype)
    largest = torch.finfo(FLOAT8[functions]).max
    return x.clamp(-largest, largest).to(FLOAT8[functions]).view(torch.uint8)


def attend(cache: TritonPagedKV, case: PagedCase) -> torch.Tensor:
    with poisoned_empty():
        return cache.attend(case.q, case.batch, 0)


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        # A mixed step has rows of every kind; alone they run in the interpreter for a few shapes.
        pytest.param(shape, step, marks=() if step == "mixed" or shape in SHAPES[1::4] else pytest.mark.gpu)
        for shape in SHAPES
        for step in STEPS
    ],
    ids=readable_id,
)
def test_matches_reference(shape: tuple[int, int, int], step: str, device: torch.device) -> None:
    spec = spec_of(shape)
    case = paged_case(spec, *STEPS[step], torch.float32, device)
    assert_close(step, attend(filled(case, spec), case), reference(case, spec), LIMITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize("shape", SHAPES, ids=readable_id)
def test_matches_reference_in_16_bits(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    spec = spec_of(shape)
    case = paged_case(spec, *STEPS["mixed"], dtype, device)
    assert_close("mixed", attend(filled(case, spec), case), reference(case, spec), LIMITS[dtype])


@pytest.mark.parametrize("route", ["template", "gather"])
@pytest.mark.parametrize(("window", "cap"), [(20, None), (None, 2.0), (16, 5.0), (1, None)], ids=readable_id)
def test_window_and_soft_cap(window: int | None, cap: float | None, route: str, device: torch.device) -> None:
    spec = spec_of((6, 2, 48), window, cap)
    case = paged_case(spec, *STEPS["mixed"], torch.float32, device)
    got = attend(filled(case, spec, prefill=route), case)
    # torch's float32 attention may build its products from three TF32 ones on a GPU.
    assert_close("masked", got, reference(case, spec), 1e-4 if route == "gather" else 1e-5)
    wrong = {"window": window + 1} if window is not None else {"soft_cap": None}
    with pytest.raises(KernelMismatch):
        assert_close("wrong rule", got, reference(case, spec, **wrong), 1e-3)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("window", [None, 30])
def test_any_number_of_splits(splits: int, window: int | None, device: torch.device) -> None:
    """More splits than tiles leave some empty, more than eight take a second step of the joining kernel."""
    spec = spec_of((3, 1, 64), window)
    case = paged_case(spec, [1, 1, 1], [1, 17, 150], torch.float32, device)
    got = attend(filled(case, spec, splits=splits), case)
    assert_close("split", got, reference(case, spec), 1e-5)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("route", ["template", "gather"])
@pytest.mark.parametrize("functions", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_with_head_scales(functions: KVFunctions, route: str, native: bool, device: torch.device) -> None:
    """Scales differ by head and between K and V; what the cache means is the rounded value times the scale."""
    spec = spec_of((4, 2, 80))
    case = paged_case(spec, *STEPS["mixed"], torch.float16, device)
    scales = torch.tensor([0.02, 0.5], device=device), torch.tensor([0.25, 0.01], device=device)
    cache = filled(case, spec, functions, torch.uint8, scales, native, prefill=route)
    got = attend(cache, case)
    plain = case.keys, case.values
    for name, pool, scale in (("keys", plain[0], scales[0]), ("values", plain[1], scales[1])):
        rounded = (pool / scale[:, None]).to(FLOAT8[functions]).float() * scale[:, None]
        setattr(case, name, rounded)
    assert_close("fp8", got, reference(case, spec), 2e-3)
    case.keys, case.values = case.keys * 2.0, case.values
    with pytest.raises(KernelMismatch):
        assert_close("k scale twice", got, reference(case, spec), 2e-2)


@pytest.mark.parametrize("sm", [75, 90])
def test_tiles_of_other_chips(sm: int, device: torch.device) -> None:
    """The tiles that real chips get give the same result; sm_75 takes tiles below 16 rows and the gather route."""
    spec = spec_of((6, 2, 64))
    case = paged_case(spec, *STEPS["mixed"], torch.float16, device)
    cache = filled(case, spec, chip=Chip.known(sm))
    assert cache.prefill == ("gather" if sm == 75 else "template")
    assert_close(f"sm_{sm}", attend(cache, case), reference(case, spec), 2e-3)


@pytest.mark.parametrize("route", ["template", "gather"])
def test_strided_q_and_large_logits(route: str, device: torch.device) -> None:
    """q is a view of a fused qkv, as layers pass it; logits in the hundreds neither overflow nor lose the winner."""
    spec = spec_of((4, 2, 64))
    case = paged_case(spec, *STEPS["mixed"], torch.float16, device, spread=30.0)
    fused = torch.zeros(case.q.shape[0], 8, 64, dtype=torch.float16, device=device)
    fused[:, :4] = case.q
    case.q = fused[:, :4]
    got = attend(filled(case, spec, prefill=route), case)
    assert torch.isfinite(got).all()
    assert_close("large", got, reference(case, spec), 4e-3)


def test_what_the_caches_own_kernel_wrote_is_read(device: torch.device) -> None:
    spec = spec_of((4, 2, 64))
    case = paged_case(spec, *STEPS["mixed"], torch.float16, device)
    cache, other = filled(case, spec), paged_case(spec, *STEPS["mixed"], torch.float16, device)
    step, case.batch.groups[0].slot_mapping = case.batch.groups[0].slot_mapping, case.slots
    keys, values = (case.cached(t).flip(1) for t in (other.keys.nan_to_num(1.0), other.values.nan_to_num(1.0)))
    cache.write(keys.half(), values.half(), case.batch, 0)
    case.batch.groups[0].slot_mapping = step
    before = reference(case, spec)
    case.keys.flatten(0, 1)[case.slots], case.values.flatten(0, 1)[case.slots] = keys, values
    got = attend(cache, case)
    assert_close("written over", got, reference(case, spec), 2e-3)
    with pytest.raises(KernelMismatch):
        assert_close("what was there", got, before, 0.1)


def test_nan_stays_in_its_sequence(device: torch.device) -> None:
    """A NaN in one sequence's cache reaches that sequence and no other; unwritten slots are NaN in every case here."""
    spec = spec_of((2, 1, 32))
    case = paged_case(spec, [1, 1, 6], [20, 20, 30], torch.float32, device)
    case.keys.flatten(0, 1)[case.slots[3]] = float("nan")
    got = attend(filled(case, spec), case)
    assert torch.isnan(got[0]).all()
    assert_close("others", got[1:], reference(case, spec)[1:], 1e-5)


def test_empty_sequence_gives_zero(device: torch.device) -> None:
    """A padded row of a captured step has no cached tokens: its output is 0, not NaN."""
    spec = spec_of((2, 1, 32))
    case = paged_case(spec, [1, 1], [20, 16], torch.float32, device)
    cache = filled(case, spec, splits=2)
    case.batch.seq_lens[1] = 0
    got = attend(cache, case)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert_close("other row", got[:1], reference(case, spec)[:1], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["template", "gather"])
@pytest.mark.parametrize("functions", [DENSE, E4M3], ids=["float16", "e4m3"])
def test_pools_whose_offsets_leave_32_bits(functions: KVFunctions, route: str) -> None:
    """Blocks that begin 4.5 GiB into the storage, written by both kernels that write, read by decodes and prefills."""
    device = torch.device("cuda")
    spec = spec_of((4, 2, 64))
    case = paged_case(spec, *STEPS["mixed"], torch.float16, device)
    keys, values = case.cached(case.keys), case.cached(case.values)
    if functions is E4M3:
        case.keys, case.values = (x.to(torch.float8_e4m3fn).float() for x in (case.keys, case.values))
    want = reference(case, spec)
    side = SideLayout.dense(spec, 16, torch.uint8 if functions is E4M3 else torch.float16)
    layout = KVLayout.of(16, side, side)
    far = (9 << 29) // layout.block_bytes
    storage = torch.empty((far + len(case.keys), layout.block_bytes), dtype=torch.uint8, device=device)
    ones = torch.ones(2, device=device)
    cache = TritonPagedKV(
        storage, layout, spec, ones, ones, functions, functions, False, torch.float16, prefill=route  # type: ignore[arg-type]
    )
    group = case.batch.groups[0]
    group.block_tables += far
    group.slot_mapping = case.slots + 16 * far
    rest = torch.ones(len(keys), 32, device=device)
    for rotating in (False, True):
        storage[0], storage[far:] = 0, 255
        if rotating:  # by no angle
            q = torch.zeros(len(keys), 4, 64, dtype=torch.float16, device=device)
            cache.rotate_and_write(q, keys.half(), values.half(), rest, rest - 1, case.batch, 0)
        else:
            cache.write(keys.half(), values.half(), case.batch, 0)
        assert_close(f"rotating {rotating}", attend(cache, case), want, 2e-3)


def test_wrong_readings_fail() -> None:
    """Control: the comparison notices a shifted causal mask, a wrong block order and swapped KV heads."""
    spec = spec_of((4, 2, 64))
    case = paged_case(spec, *STEPS["mixed"], torch.float32, torch.device("cpu"))
    right = reference(case, spec)
    swapped = PagedCase(case.batch, case.keys.flip(2), case.values.flip(2), case.slots, case.q)
    shifted = paged_attention_reference(
        case.q, case.keys, case.values, case.tables.clone(), [1, 1, 18, 3], [40, 1, 18, 48], spec.scale
    )
    moved = PagedCase(case.batch, case.keys.roll(1, 1), case.values.roll(1, 1), case.slots, case.q)
    for name, wrong in (("heads", reference(swapped, spec)), ("causal", shifted), ("slots", reference(moved, spec))):
        with pytest.raises(KernelMismatch):
            assert_close(name, wrong, right, max(LIMITS.values()))


def test_packed_rows_are_refused() -> None:
    spec = spec_of((2, 1, 32))
    side = SideLayout.dense(spec, 16, torch.uint8, row=16)
    layout = KVLayout.of(16, side, side)
    storage, ones = torch.zeros(2, 1024, dtype=torch.uint8), torch.ones(1)
    with pytest.raises(ValueError, match="row 16, head_dim 32"):
        TritonPagedKV(storage, layout, spec, ones, ones, E4M3, E4M3, False, torch.float16)
