"""`qengine doctor`: a whole run on this machine, wrong kernels that it must find, and its advice on faked machines."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from typing import Any

import pytest
import torch

from qengine.cli.main import main
from qengine.core.memory import format_bytes
from qengine.doctor import self_test as tests
from qengine.doctor.advice import advice
from qengine.doctor.bandwidth import Bandwidth, measure_bandwidth
from qengine.doctor.capabilities import capability_table
from qengine.doctor.environment import Environment, GpuState, look_around
from qengine.doctor.report import environment_lines
from qengine.doctor.self_test import GPU_SPECS, ROWS, Result, self_test
from qengine.layers.activation import GatedActivation
from qengine.layers.norm import RMSNorm
from qengine.runtime.device import cpu_info
from qengine.runtime.device_matrix import gpu
from qengine_kernels.cpu_attention import CpuPagedKV
from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm.tiled_config import plan_tiles

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_a_whole_run(report: dict[str, Any]) -> None:
    assert report["healthy"] and report["device"].startswith("cpu")
    states = {r["what"]: r["state"] for r in report["self_test"]}
    assert set(states.values()) == {"passed"}, [r for r in report["self_test"] if r["state"] != "passed"]
    parts = ("16-bit, bfloat16", "awq 4-bit", "gptq 4-bit", "fp8 per channel", "KV cache fp8_e4m3: attention", "norm")
    for part in parts:
        assert any(part in what for what in states), part
    assert sum(r["seconds"] for r in report["self_test"]) < 30
    assert report["bandwidth"]["host_copy"] > 1e8 and report["bandwidth"]["pinned_to_gpu"] is None
    assert report["environment"]["packages"]["torch"] == torch.__version__
    formats = {(row["kind"], row["name"]) for row in report["capabilities"]}
    assert {("KV cache", "auto"), ("weights", "16-bit")} <= formats


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for part in ("qengine ", "torch ", "Host memory: ", "weights", "KV cache", "Advice: ", "float16 is not run"):
        assert part in out
    assert "Kernels against float32" not in out, "--quick tests nothing"


def wrong_norm(monkeypatch: pytest.MonkeyPatch) -> str:
    real = RMSNorm.add
    monkeypatch.setattr(RMSNorm, "add", lambda self, x, residual: real(self, x, residual) * 1.05)
    return "norm with residual"


def wrong_activation(monkeypatch: pytest.MonkeyPatch) -> str:
    """The gate and the value in the wrong order."""
    real = GatedActivation.__call__
    monkeypatch.setattr(GatedActivation, "__call__", lambda self, x: real(self, x.roll(x.shape[-1] // 2, -1)))
    return "gated activation"


def wrong_linear(monkeypatch: pytest.MonkeyPatch) -> str:
    """Zero points off by one."""
    import qengine_awq.backend as awq

    real = awq.Int4CpuLinear

    def shifted(codes: Any, scales: Any, zeros: Any, *rest: Any, **options: Any) -> Any:
        return real(codes, scales, zeros + 1, *rest, **options)

    monkeypatch.setattr(awq, "Int4CpuLinear", shifted)
    return "awq"


def wrong_cache(monkeypatch: pytest.MonkeyPatch) -> str:
    real = CpuPagedKV.attend
    monkeypatch.setattr(CpuPagedKV, "attend", lambda self, q, batch, group: real(self, q * 1.1, batch, group))
    return "KV cache"


@pytest.mark.parametrize("break_it", [wrong_norm, wrong_activation, wrong_linear, wrong_cache])
def test_a_wrong_kernel_is_found(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    what = break_it(monkeypatch)
    failed = [r for r in self_test(CPU, cpu_info()) if r.state == "failed"]
    assert failed and all(what in r.what for r in failed), failed
    assert advice(machine(), None, failed)[0].startswith(f"{len(failed)} kernel(s) compute wrongly here")


def test_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    results = self_test(CPU, cpu_info(), budget_s=0.0)
    assert {r.state for r in results} == {"skipped"}
    assert "not every kernel was tested" in advice(machine(), None, results)[0]


def test_a_kernel_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> str:
        raise RuntimeError("an illegal instruction\nwas met")

    monkeypatch.setattr(tests, "LAYER_TESTS", (("norm", broken),))
    first = self_test(CPU, cpu_info())[0]
    assert (first.state, first.line) == ("failed", "RuntimeError: an illegal instruction")


@pytest.mark.parametrize(
    ("sm", "dtype", "fp8_weights", "fp8_cache"),
    [
        (75, "float16", "emulated", "emulated"),
        (86, "bfloat16", "emulated", "emulated"),
        (90, "bfloat16", "native", "native"),
    ],
)
def test_capabilities_of_gpus_that_are_not_here(sm: int, dtype: str, fp8_weights: str, fp8_cache: str) -> None:
    rows = {row.name: row.answers for row in capability_table(gpu(sm))}
    assert rows["16-bit"]["bfloat16"].kind == ("refused" if sm == 75 else "native")
    fp8 = next(answers for name, answers in rows.items() if "fp8 per channel" in name)
    assert fp8[dtype].kind == fp8_weights and rows["fp8_e4m3"][dtype].kind == fp8_cache
    assert rows["awq 4-bit g128"][dtype].kind == "native"


def machine(**changes: Any) -> Environment:
    """A tidy machine without a GPU."""
    values: dict[str, Any] = {
        "packages": {"torch": "2.12.0", "triton": "3.7.0", "transformers": "5.20.0"}, "driver": None,
        "torch_cuda": "13.0", "cpu_features": ["avx2"], "cores": 8, "threads": 8, "memory_total": 64 * GIB,
        "memory_free": 60 * GIB, "memory_neighbours": [], "gpus": [],
    }  # fmt: skip
    return dataclasses.replace(look_around(), **(values | changes))


def a_gpu(**changes: Any) -> GpuState:
    fields: dict[str, Any] = {
        "name": "Tesla T4", "sm": 75, "total": 15 * GIB, "free": 15 * GIB, "shared_memory": 65536, "usable": True,
        "known": "T4",
    }  # fmt: skip
    return GpuState(**(fields | changes))


def test_a_tidy_machine_needs_no_advice() -> None:
    ampere = a_gpu(name="NVIDIA H100", sm=90, known="H100")
    assert advice(machine(driver="580", gpus=[ampere]), Bandwidth(1e10, 5e10), [Result("x", "passed", "", 0.1)]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"driver": "580.1", "torch_cuda": None}, "torch is a CPU build"),
        ({"driver": "390.1"}, "update the driver"),
        ({"packages": {"torch": "2.4.0"}}, "torch 2.4.0 is not what was tested: pip install 'torch"),
        ({"packages": {"transformers": None}}, "transformers is not installed"),
        ({"threads": 32}, "32 threads on 8 cores"),
        ({"cpu_features": []}, "neither AVX2 nor NEON"),
        ({"memory_free": GIB, "memory_neighbours": ["java (pid 7) 50.00 GiB"]}, "java (pid 7)"),
        ({"driver": "580", "gpus": [a_gpu()]}, "sm_75 has no bfloat16"),
        ({"driver": "580", "gpus": [a_gpu(sm=61, usable=False, name="GTX 1080")]}, "sm_75 or newer is needed"),
        (
            {"driver": "580", "gpus": [a_gpu(sm=90, free=5 * GIB, neighbours=["trainer (pid 4711) 10.00 GiB"])]},
            "10.00 GiB are taken by others (trainer (pid 4711) 10.00 GiB)",
        ),
        ({"driver": "580", "gpus": [a_gpu(sm=86, name="A10", known="A10")]}, "no FP8 units"),
    ],
)
def test_advice(changes: dict[str, Any], said: str) -> None:
    lines = advice(machine(**changes), None, [])
    assert any(said in line for line in lines), lines
    assert not any(said in line for line in advice(machine(), None, []))


def test_a_slow_link_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    t4 = machine(driver="580", gpus=[a_gpu()])
    assert any("reach 3.0 GB/s where 12 are usual" in line for line in advice(t4, Bandwidth(1e10, 3e9), []))
    assert not any("are usual" in line for line in advice(t4, Bandwidth(1e10, 11e9), []))


def test_neighbours_are_listed() -> None:
    lines = environment_lines(machine(gpus=[a_gpu(neighbours=["trainer (pid 4711) 9.00 GiB"])]))
    assert "  held by trainer (pid 4711) 9.00 GiB" in lines
    assert any(format_bytes(15 * GIB) in line and "T4" in line for line in lines)


def test_host_copies_are_measured() -> None:
    found = measure_bandwidth(CPU, 16 << 20)
    assert 1e8 < found.host_copy < 1e13 and found.gpu_to_pinned is None


def test_unknown_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "tpu"]) == 2
    assert "unknown value 'tpu'" in capsys.readouterr().err


def test_the_self_test_reaches_every_kernel_of_4_bit_linears() -> None:
    hopper = Chip.known(90)
    plans = {plan_tiles(hopper, m, s.out_features, s.in_features, 128) for m, s in product(ROWS, GPU_SPECS)}
    assert {(plan.kind, plan.splits > 1) for plan in plans} >= {("few", True), ("many", True), ("paired", True)}
