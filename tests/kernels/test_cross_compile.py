"""Every kernel compiles for every supported chip and fits its shared memory; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qengine_kernels.launch import SHARED_MEMORY

WORKER = Path(__file__).with_name("cross_compile_worker.py")
SHARES = ["75,80,86,120", "89,90,100"]
"""Two processes, for two cores."""


def run(arguments: list[str]) -> list[list[dict[str, Any]]]:
    """The workers' reports; real compilation, so not in the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), argument], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for argument in arguments
    ]
    reports = []
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err.decode()[-2000:]
        reports.append([json.loads(line) for line in out.splitlines()])
    return reports


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_variants_on_all_chips() -> None:
    rows = [row for report in run(SHARES) for row in report]
    assert {row["sm"] for row in rows} == {75, 80, 86, 89, 90, 100, 120}
    failed = [f"sm_{row['sm']} {row['name']}: {row['error'][:300]}" for row in rows if "error" in row]
    assert not failed, "\n".join(failed)
    too_large = [row for row in rows if row["shared"] > row["limit"]]
    assert not too_large, too_large
    for sm in (75, 80, 86, 89, 90, 100, 120):
        kinds = {row["name"].split()[0] for row in rows if row["sm"] == sm}
        needed = {"decode", "combine", "gather", "write_kv", "gemv", "dequantize", "sum_splits"}
        needed |= {"scaled_activation", "fp8_gemv", "fp8_dequantize", "experts_gemv", "int8_pair", "int8_rows"}
        needed |= {"prefill", "gemm", "fp8_gemm", "experts_dot"} if sm >= 80 else set()
        needed |= {"tiled_few", "tiled_many", "tiled_dequantize"} if sm >= 80 else set()
        needed |= {"fp8_pair", "quantize_rows"} if sm >= 89 else set()
        assert needed <= kinds, (sm, needed - kinds)


@pytest.mark.slow
def test_what_must_fail_fails() -> None:
    """Control: the compiler does refuse e4m3 casts below sm_89, and products left under way are seen, so success above
    means something."""
    (rows,) = run(["control"])
    assert len(rows) == 6 and all("error" in row for row in rows), rows
    for row, what in zip(rows[3:], ("before the wait", "write too early", "under way"), strict=True):
        assert what in row["error"], row


LOOP = """
.L_x_1:
        /*0010*/                   LDS.64 R6, [R4] ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R7, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R61], desc[UR14][R20.64] ;
        /*0060*/              @!P6 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""


def test_what_machine_code_may_not_do_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A register that a product of the step before still reads is written to; shared memory is, when one group of warps
    alone knows that the product has ended."""
    monkeypatch.syspath_prepend(WORKER.parent)
    from cross_compile_sass import faults_of_products

    late = LOOP.format(pending="0x1")
    assert [fault[:4] for fault in faults_of_products(late, 4)] == ["0010"]
    assert [fault[:4] for fault in faults_of_products(late, 8)] == ["0010", "0050"]
    assert faults_of_products(LOOP.format(pending="0x0"), 8) == []
    assert [fault[:4] for fault in faults_of_products(late.replace("R7", "gdesc[UR8]"), 8)] == ["0050"]
    with pytest.raises(ValueError, match="no products"):
        faults_of_products(late.replace("HGMMA", "HMMA"), 8)


def test_limits_are_the_documented_ones() -> None:
    limits = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
    assert {sm: SHARED_MEMORY[sm] for sm in limits} == limits
