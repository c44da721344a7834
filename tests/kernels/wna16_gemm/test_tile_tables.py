"""Tables of tiles: candidates that can be launched, files that come back as they were, launches that read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm.tile_table import save, use
from qengine_kernels.wna16_gemm.tiled_config import Entry, plan_entry, plan_tiles, shared_bytes
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
    assert plan_tiles(HOPPER, 65, 4096, 1024, 64).kind == "many", "another group has tables of its own"


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
    assert {entry.block_m for entry in candidates(most)} <= {0, 8, 16, 32, 64, 128, 256, 2048, 4096, 6144}
    kinds = {"few", "many"} if most <= 16 else {"many"} if most < 64 else {"many", "wide"}
    if most > 512:
        kinds = {"wide", "dequantize"}
    assert {entry.kind for entry in candidates(most)} == kinds
    assert {entry.kind for entry in t.entries.values()} == (kinds if n % 256 == 0 else kinds - {"wide"})


def test_wide_tiles_run_where_they_can_and_others_elsewhere() -> None:
    entry = Entry(256, "wide", 16, 4, 128, 4, 6)
    there = plan_entry(HOPPER, entry, 256, 4096, 1024, 128)
    assert (there.kind, there.tiles, there.splits, there.share) == ("wide", 32, 2, 8)
    assert (there.kind, there.rows, there.elements) == ("wide", 4, 32 * 2 * 256 * 128)
    for chip, n, group in ((Chip.known(80), 4096, 128), (HOPPER, 4160, 128), (HOPPER, 4096, 32)):
        assert plan_entry(chip, entry, 256, n, 1024, group).kind == "many"
    assert plan_entry(HOPPER, Entry(4096, "dequantize", 64, 1, 0, 4, 1), 4096, 4096, 1024, 128).kind == "dequantize"


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
