"""The kernel for many rows on sm_90, against float32 torch. It has no interpreter: on a CPU only its plans are tested
(test_tile_tables.py) and its machine code is read (test_nvrtc.py)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from qengine_kernels.launch import Chip
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id
from qengine_kernels.wna16_gemm import PackedWeight, pack_codes, to_tiles
from qengine_kernels.wna16_gemm.tiled_config import PAIRED_STEPS, Entry, paired_runs, plan_entry
from qengine_kernels.wna16_gemm.tiled_launcher import run_plan

pytestmark = pytest.mark.gpu
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not paired_runs(Chip.of(CUDA), 64):
        pytest.skip("the kernel is for sm_90 alone")


def case(k: int, n: int, group: int, scales: torch.dtype) -> tuple[PackedWeight, torch.Tensor]:
    """A weight and its dense float32 meaning [K, N], from the codes and not from the packing."""
    codes, zeros = (torch.randint(0, 16, (rows, n), dtype=torch.uint8, device=CUDA) for rows in (k, k // group))
    scale = (torch.rand(k // group, n, device=CUDA) * 0.05 + 0.01).to(scales)
    row = torch.arange(k, device=CUDA) // group
    dense = (codes.float() - zeros.float()[row]) * scale.float()[row]
    return PackedWeight(pack_codes(codes), scale, zeros, k, group), dense


@pytest.mark.parametrize("dtype", list(LIMITS), ids=readable_id)
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16], ids=readable_id)
@pytest.mark.parametrize(("k", "group"), [(64, 64), (320, 64), (512, 128), (1024, 1024), (1152, 192), (4096, 128)])
@pytest.mark.parametrize("m", [1, 64, 129, 300])
def test_matches_reference(m: int, k: int, group: int, scales: torch.dtype, dtype: torch.dtype) -> None:
    """Tiles of all kinds would be many kernels to compile: each number of rows takes every fourth."""
    n = 448  # no whole number of any tile
    packed, dense = case(k, n, group, scales)
    weight = to_tiles(packed)
    bias = torch.randn(n, device=CUDA).to(dtype)
    tiles = [*PAIRED_STEPS, (4, 128)][(1, 64, 129, 300).index(m) :: 4]
    # Rows that neither begin at 16 bytes nor lie 16 bytes apart are copied first; the last has NaN beside it.
    contiguous = torch.randn(m, k, device=CUDA).to(dtype)
    beside_nan = torch.full((m, k + 3), torch.nan, device=CUDA).to(dtype)[:, 1 : k + 1].normal_()
    many_nan = torch.full((512, k), torch.nan, device=CUDA).to(dtype)
    for (rows, block_m), fill, x in product(tiles, range(2), (contiguous, beside_nan)):
        plan, before = (
            plan_entry(Chip.of(CUDA), Entry(of, "paired", 16, rows, block_m, 4, 0, fill), of, n, k, weight.group)
            for of in (m, 512)
        )
        assert plan.kind == "paired" and plan.splits == (2 if fill and k > 64 else 1)
        run_plan(many_nan, weight, bias, before)  # stays in shared memory: rows beyond the last are not copied there
        with poisoned_empty():
            got = run_plan(x, weight, bias, plan)
        want = x.float() @ dense + bias.float()
        assert_close(f"{rows} x {block_m}", got, want, LIMITS[dtype])
    for name, wrong in (("an output further", dense.roll(1, 1)), ("half of them", dense.roll(128, 1)),
                        ("a tile further", dense.roll(64, 0) if k > 64 else dense.roll(1, 0))):  # fmt: skip
        with pytest.raises(KernelMismatch):
            assert_close(name, got, x.float() @ wrong + bias.float(), 0.1)


@pytest.mark.parametrize("m", [128, 256, 512, 2048])
@pytest.mark.parametrize("tile", [*PAIRED_STEPS, (4, 128)], ids=str)
def test_the_same_bits_each_time_and_those_of_other_tiles(m: int, tile: tuple[int, int]) -> None:
    """A full chip, many steps: where loading, decoding and multiplying get in each other's way, it is by chance."""
    packed, dense = case(4096, 4096, 128, torch.float16)
    weight, chip = to_tiles(packed), Chip.of(CUDA)
    x = torch.randn(m, 4096, device=CUDA, dtype=torch.bfloat16)
    for fill in range(2):
        plan = plan_entry(chip, Entry(m, "paired", 16, *tile, 4, 0, fill), m, 4096, 4096, 128)
        first = run_plan(x, weight, None, plan)
        assert_close(f"{m} rows", first, x.float() @ dense, LIMITS[torch.bfloat16])
        assert all(torch.equal(first, run_plan(x, weight, None, plan)) for _ in range(20)), (m, fill)
    other = run_plan(x, weight, None, plan_entry(chip, Entry(m, "many", 16, 2, 128, 4, 4, 1), m, 4096, 4096, 128))
    assert_close("the other kernel", first, other.float(), LIMITS[torch.bfloat16])


def test_in_a_graph_it_is_what_it_was() -> None:
    packed, _ = case(1024, 512, 128, torch.float16)
    weight, chip = to_tiles(packed), Chip.of(CUDA)
    plan = plan_entry(chip, Entry(200, "paired", 16, 2, 128, 4, 0, 1), 200, 512, 1024, 128)
    x = torch.randn(200, 1024, device=CUDA, dtype=torch.bfloat16)
    run_plan(x, weight, None, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_plan(x, weight, None, plan)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, run_plan(x, weight, None, plan))
