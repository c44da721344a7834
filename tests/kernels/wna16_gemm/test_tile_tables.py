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


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 4096), (4096, 14336)])
def test_wide_tiles_run_where_they_can_and_others_elsewhere(shape: tuple[int, int]) -> None:
    def kinds(chip: Chip, n: int, group: int) -> list[str]:
        return [plan_tiles(chip, m, n, shape[1], group).kind for m in (8, 32, 200, 512, 2048, 2049)]

    few, *middle, most = kinds(HOPPER, shape[0], 128)
    assert (few, middle, most) == ("few", ["many", "wide", "wide", "wide"], "dequantize")
    for chip, n, group in ((Chip.known(80), shape[0], 128), (HOPPER, shape[0] + 64, 128), (HOPPER, shape[0], 32)):
        assert kinds(chip, n, group) == ["few", "many", "many", "many", "dequantize", "dequantize"]


@pytest.mark.parametrize(
    ("m", "n", "k", "shares"),
    [
        (256, 4096, 1024, [16, 8, 8, 16]),  # 32 tiles of 16 steps: no fewer than 8, which are not worth it
        (256, 28672, 4096, [128, 109, 128, 128]),  # 224 tiles of 64 steps: equal parts of them would be 109
        (256, 6144, 4096, [64, 24, 32, 32]),  # 48 tiles: two programs each are 96, and equal parts keep 128 busy
        (256, 4096, 14336, [224, 55, 56, 56]),
        (512, 6144, 4096, [64, 47, 64, 64]),
        (2048, 4096, 14336, [448, 435, 448, 448]),
    ],
)
def test_steps_of_a_program(m: int, n: int, k: int, shares: list[int]) -> None:
    plans = [plan_entry(HOPPER, Entry(m, "wide", 16, 4, 128, 4, 6, fill), m, n, k, 128) for fill in range(4)]
    assert [plan.share for plan in plans] == shares and [plan.splits for plan in plans] == [1, 2, 2, 2]
    total = n // 256 * (m // 128) * (k // 64)
    for plan in plans:
        assert plan.tiles <= HOPPER.multiprocessors and 0 < total - plan.share * (plan.tiles - 1) <= plan.share
        assert (plan.kind, plan.elements) == ("wide", plan.tiles * plan.splits * 256 * 128)


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
