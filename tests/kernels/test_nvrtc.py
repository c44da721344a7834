"""CUDA C++ kernels, compiled with no GPU: what is wrong is said, and what is right has machine code as it should be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qengine_kernels.launch import Chip
from qengine_kernels.nvrtc import Source, cached_cubin, compile_cubin
from qengine_kernels.wna16_gemm import paired_launcher
from qengine_kernels.wna16_gemm.paired_launcher import source
from qengine_kernels.wna16_gemm.tiled_config import PAIRED_STEPS, plan_paired, plan_tiles
from qengine_kernels.wna16_gemm.tune import candidates

HOPPER = Chip(90, 227 * 1024, 132)
TILES = sorted({(entry.rows, entry.block_m) for entry in candidates(128) if entry.kind == "paired"} | set(PAIRED_STEPS))


@pytest.fixture(autouse=True)
def _reader_of_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def paired(tile: tuple[int, int], dtype: torch.dtype, scales: torch.dtype) -> Source:
    return source(*tile, plan_paired(HOPPER, *tile, True, 256, 6144, 4096).num_stages, 128, dtype, scales, True)


def faults(made: Source, groups: int) -> list[str]:
    from cross_compile_sass import disassembled, faults_of_products

    sass = disassembled(compile_cubin(made))
    found = faults_of_products(sass, 4 * groups + 4)
    products = [line for line in sass.splitlines() if "HGMMA." in line]
    ends = sum("gsb0" in line for line in products)
    if not products or len(products) != 4 * ends:
        found.append(f"{len(products)} products in {ends} groups: one waits for the other")
    if spills := len(re.findall(r"\b(?:STL|LDL)\b", sass)):
        found.append(f"{spills} instructions for registers that do not suffice")
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_paired_keeps_registers_and_products_run_on(tile: tuple[int, int], dtype: torch.dtype) -> None:
    assert faults(paired(tile, dtype, torch.float16), tile[0]) == []


def test_what_the_last_test_looks_for_is_found() -> None:
    made = paired((4, 128), torch.bfloat16, torch.bfloat16)

    def having(name: str, value: int) -> Source:
        return replace(made, constants=tuple((n, value if n == name else v) for n, v in made.constants))

    assert any("one waits for the other" in fault for fault in faults(having("AHEAD", 1), 4))
    assert any("do not suffice" in fault for fault in faults(having("REGISTERS", 72), 4))


def test_all_tiles_are_made_ready_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of rows comes first while serving, its kernel is there."""
    loaded: list[dict[str, int]] = []
    monkeypatch.setattr(paired_launcher.Chip, "of", lambda device: HOPPER)
    monkeypatch.setattr(paired_launcher, "cached_cubin", lambda source: b"")
    monkeypatch.setattr(paired_launcher, "load", lambda source, *about: loaded.append(dict(source.constants)))
    for _ in range(2):
        paired_launcher.make_ready(7, 128, torch.bfloat16, torch.float16, True)
    assert [(c["GROUPS"], c["ROWS"]) for c in loaded] == list(PAIRED_STEPS)
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (448, 512)):
        plans = [plan_tiles(HOPPER, m, n, k, 128) for m in range(65, 9000, 37)]
        taken = {(plan.rows, plan.block_m, plan.num_stages) for plan in plans}
        assert taken <= {(c["GROUPS"], c["ROWS"], c["STAGES"]) for c in loaded}


def test_machine_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = Source("twice", 'extern "C" __global__ void twice(int *p) { *p *= FACTOR; }', (("FACTOR", 2),), "sm_90a")
    first = cached_cubin(made)
    assert first.startswith(b"\x7fELF")
    (kept,) = tmp_path.rglob("*.cubin")
    kept.write_bytes(b"kept")
    assert cached_cubin(made) == b"kept"
    assert cached_cubin(replace(made, constants=(("FACTOR", 3),))).startswith(b"\x7fELF")


def test_a_compiler_error_names_the_kernel_and_its_constants() -> None:
    broken = Source("broken", 'extern "C" __global__ void broken() { nothing; }', (("FACTOR", 2),), "sm_90a")
    with pytest.raises(RuntimeError, match=r"(?s)broken \{'FACTOR': 2\}.*\"nothing\" is undefined"):
        compile_cubin(broken)
