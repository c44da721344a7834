"""Tables of tiles: candidates that can be launched, files that come back as they were, launches that read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm.tile_table import save, use
from qengine_kernels.wna16_gemm.tiled_config import (
    PAIRED_STEPS,
    Entry,
    paired_bytes,
    paired_depth,
    paired_us,
    plan_entry,
    plan_paired,
    plan_tiles,
    shared_bytes,
)
from qengine_kernels.wna16_gemm.tune import candidates, trial, tune, variant

HOPPER = Chip(90, 227 * 1024, 132)
ENTRIES = (Entry(16, "few", 64, 1, 16, 4, 3, 2), Entry(64, "many", 16, 2, 64, 8, 4, 1))


@pytest.fixture(autouse=True)
def _forget_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: dict[object, object] = {}
    for module in ("tiled_config", "tile_table"):
        monkeypatch.setattr(f"qengine_kernels.wna16_gemm.{module}.TUNED", tables)


def test_a_table_comes_back_and_is_read_by_launches(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.json"
    save(path, HOPPER, {(4096, 1024, 128): ENTRIES}, {"device": "a GPU", "triton": "3.6"})
    before = plan_tiles(HOPPER, 10, 4096, 1024, 128)
    assert "1 shapes" in use(path, HOPPER) and "a GPU" in use(path, HOPPER)
    after = plan_tiles(HOPPER, 10, 4096, 1024, 128)
    assert after == plan_entry(HOPPER, ENTRIES[0], 10, 4096, 1024, 128) != before
    assert plan_tiles(HOPPER, 40, 4096, 1024, 128).block_m == 64
    assert plan_tiles(HOPPER, 65, 4096, 1024, 128).kind == "dequantize", "beyond what was measured"
    assert plan_tiles(HOPPER, 65, 4096, 1024, 64).kind == "paired", "another group has tables of its own"


def test_other_files_and_other_chips_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save(path, HOPPER, {(4096, 1024, 128): ENTRIES}, {})
    with pytest.raises(ValueError, match="another chip"):
        use(path, Chip.known(80))
    for text in ("", "[]", "{}", path.read_text().replace('"few"', '"few", 1, 2')):
        path.write_text(text)
        with pytest.raises(ValueError, match="no table of tiles"):
            use(path, HOPPER)
    with pytest.raises(ValueError, match="no table of tiles"):
        use(tmp_path / "missing.json", HOPPER)


@pytest.mark.parametrize("n", [4096, 4160], ids=["pairs of tiles", "an odd tile"])
@pytest.mark.parametrize("most", [3, 16, 100, 512, 2048])
def test_trials_fit_the_chip_and_have_what_is_in_use(most: int, n: int) -> None:
    t = trial(HOPPER, (n, 1024, 128), most)
    assert len(t.entries) > (5 if most <= 512 else 0) and t.used in t.entries
    assert all(entry.most == most and shared_bytes(entry) <= HOPPER.shared_memory for entry in t.entries.values())
    assert {variant(plan).tiles for plan in t.entries} == {1}
    assert {entry.block_m for entry in candidates(most)} <= {0, 8, 16, 32, *range(64, 257, 32), 2048, 4096, 6144}
    kinds = {"few", "many"} if most <= 16 else {"many", "paired"}
    if most > 512:
        kinds = {"paired", "dequantize"}
    assert {entry.kind for entry in candidates(most)} == kinds
    assert {entry.kind for entry in t.entries.values()} == kinds


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 4096), (4096, 14336)])
def test_pairs_of_tiles_run_where_they_can_and_others_elsewhere(shape: tuple[int, int]) -> None:
    def kinds(chip: Chip, n: int, group: int) -> list[str]:
        return [plan_tiles(chip, m, n, shape[1], group).kind for m in (8, 32, 64, 65, 512, 4096)]

    for n, group in ((shape[0], 128), (shape[0] + 64, 128), (shape[0], 0)):
        middle = "many" if n > 128 * 132 else "paired"
        assert kinds(HOPPER, n, group) == ["few", "many", middle, "paired", "paired", "paired"]
    for chip, group in ((Chip.known(80), 128), (HOPPER, 32)):
        assert kinds(chip, shape[0], group) == ["few", "many", "many", "many", "many", "dequantize"]


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "items", "pairs"),
    [
        (512, 6144, 4096, (3, 128), 64, 64),  # 128 tiles, one for each program
        (256, 4096, 4096, (2, 128), 64, 0),  # 64 tiles, all of them shared by two programs
        (896, 6144, 4096, (2, 224), 126, 66),  # 192 tiles: one for each program, and 60 that are shared
        (2048, 4096, 14336, (2, 256), 128, 128),
        (65, 64, 64, (1, 96), 1, 1),  # inputs of one stage are not shared
        (65, 64, 128, (1, 96), 1, 1),
    ],
)
def test_pairs_and_shared_tiles(m: int, n: int, k: int, tile: tuple[int, int], items: int, pairs: int) -> None:
    plan = plan_tiles(HOPPER, m, n, k, 128)
    assert ((plan.rows, plan.block_m), plan.tiles, plan.share) == (tile, items, pairs)
    assert paired_bytes(plan.rows, plan.block_m, plan.num_stages) <= HOPPER.shared_memory
    tiles = -(-n // (64 * plan.rows)) * -(-m // plan.block_m)
    assert tiles <= plan.share * 2 + (plan.tiles - plan.share) <= tiles + -(-m // plan.block_m)


@pytest.mark.parametrize("tile", PAIRED_STEPS)
def test_more_rows_take_no_less_and_all_sums_find_room(tile: tuple[int, int]) -> None:
    us = [paired_us(HOPPER, plan_paired(HOPPER, *tile, False, m, 4096, 4096), 4096) for m in range(65, 3000, 100)]
    assert us == sorted(us)
    for m in (65, 300, 1000, 3000):
        plan = plan_paired(HOPPER, *tile, True, m, 6144, 4096)
        assert plan.splits == (2 if plan.tiles > plan.share else 1) and plan.num_stages >= 3
        if plan.splits == 2:  # shared tiles come last, at most one for each pair of programs
            assert plan.share % 66 == 0 and plan.tiles - plan.share <= 66
        sums = 4 * 64 * plan.rows * plan.block_m // 2
        room = plan.num_stages * paired_depth(plan.block_m) * 128 * plan.block_m
        assert sums <= room, "sums go where x lay"


@pytest.mark.gpu
def test_tuning_finds_tiles_that_are_no_slower(tmp_path: Path) -> None:
    said: list[str] = []
    (found,) = tune([(512, 512, 128)], [8], said.append, 4).values()
    assert found[0].us <= found[0].used_us and "kernels to compile" in said[0]
    path = tmp_path / "table.json"
    chip = Chip.of(torch.device("cuda"))
    save(path, chip, {(512, 512, 128): [f.entry for f in found]}, {})
    use(path, chip)
    assert plan_tiles(chip, 5, 512, 512, 128) == plan_entry(chip, found[0].entry, 5, 512, 512, 128)
