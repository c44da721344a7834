"""The kit sees each thing that a KV dtype can do wrong, by the check that is meant for it, and says what it saw."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import broken_kv as broken
from qengine.cli.plugins_check import line
from qengine.conformance.compile_job import CompileJob, check_report, left_out, run_worker, where_is
from qengine.conformance.kit import CheckFailed, NotApplicable, run_check
from qengine.conformance.kv_steps import as_good
from qengine.conformance.kv_subject import SMALL
from qengine.conformance.kv_suite import KV_CHECKS, KVSubject
from qengine.conformance.places import places

BY_NAME = {check.name: check for check in KV_CHECKS}
# CUDA code runs on a GPU where there is one: the interpreter would be on for all other tests of this process too.
EVERYWHERE = places(gpu=torch.cuda.is_available())
ON_CPU, IN_TRITON = EVERYWHERE[:1], EVERYWHERE[1:]

CASES = [
    (broken.TakesNoVersion, "contract", "states 2.0"),
    (broken.ScalesWithoutLargest, "contract", "with max_value None"),
    (broken.SilentRefusal, "capability", "refused without a reason"),
    (broken.LiesAboutBytes, "layout", r"states \d+ bytes, its rows reach to byte \d+"),
    (broken.RowsOverlap, "layout", "rows overlap"),
    (broken.InvertedScale, "round trip", "is off by"),
    (broken.NotDeterministic, "round trip", "other bits the second time"),
    (broken.NaNSpreads, "extremes", "changes what others store"),
    (broken.TooLargeMaximum, "calibration", "is off by|off by"),
    (broken.SwapsSides, "attention", "prefill: off by"),
    (broken.ForgetsTheWindow, "attention", "window 20.*off by"),
    (broken.LosesTheBlockEdge, "store", "stored k: off by"),
    (broken.IgnoresScales, "scales", "stored with scales: off by|attention with scales"),
    (broken.PrefixDependent, "steps", "token by token, other bits|in chunks, other bits"),
    (broken.DependsOnNeighbours, "steps", "in chunks, other bits"),
    (broken.KeepsTokensElsewhere, "offload", "moved blocks give other bits"),
]
IN_KERNELS = [
    (broken.LeavesAByte, "store", "depends on what lay there before"),
    (broken.WritesBeyond, "store", "bytes change outside the rows"),
    (broken.ZeroOffByOne, "attention", "prefill: off by"),
]


@pytest.mark.parametrize(("plugin", "check", "says"), CASES, ids=lambda v: getattr(v, "__name__", None))
def test_a_broken_dtype_is_caught_by_the_check_for_it(plugin: Any, check: str, says: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        BY_NAME[check].run(KVSubject(plugin, ON_CPU))
    assert re.search(says, str(caught.value)), caught.value


@pytest.mark.parametrize(("plugin", "check", "says"), IN_KERNELS, ids=lambda v: getattr(v, "__name__", None))
def test_a_broken_device_function_is_caught(plugin: Any, check: str, says: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        BY_NAME[check].run(KVSubject(plugin, IN_TRITON))
    assert re.search(says, str(caught.value)), caught.value


@pytest.mark.parametrize("check", ["layout", "round trip", "extremes", "store", "steps", "offload", "determinism"])
def test_the_right_one_passes(check: str) -> None:
    BY_NAME[check].run(KVSubject(broken.Rows, ON_CPU))


def test_the_right_device_functions_pass() -> None:
    BY_NAME["store"].run(KVSubject(broken.Rows, IN_TRITON))


def test_a_claim_that_the_compiler_denies_is_caught() -> None:
    with pytest.raises(CheckFailed, match=r"sm_75 is claimed, but .* does not compile for it"):
        BY_NAME["targets"].run(KVSubject(broken.ClaimsWhatDoesNotCompile, ON_CPU, targets=(75,)))


def test_a_tie_may_go_either_way_and_nothing_else() -> None:
    """One step is a third of a usual value here, as in 4 bits: a single tie would show in the norm of the error."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 3
    x[:4] = torch.tensor([0.5, 1.5, -2.5, 4.5])
    want = x.round()
    other = want.clone()
    other[:4] = torch.tensor([1.0, 1.0, -3.0, 5.0])
    as_good("stored k", other, want, x)
    with pytest.raises(CheckFailed, match="stored k: off by"):
        as_good("stored k", x.floor(), want, x)
    one_wrong = want.clone()
    one_wrong[7] += 1
    with pytest.raises(CheckFailed, match="stored k: off by"):
        as_good("stored k", one_wrong, want, x)
    with pytest.raises(CheckFailed, match="of the values are not what encode makes"):
        as_good("stored k", x, want, x)
    with pytest.raises(CheckFailed, match="stored k: off by"):
        as_good("stored k", torch.where(want == want[9], torch.nan, want), want, x)


def test_a_chip_that_this_triton_does_not_know_is_left_out_and_said() -> None:
    """A real worker's report, as an older assembler would have made it for the last chip."""
    rows = run_worker(CompileJob(where_is(broken.Rows), (90,), torch.float16, caches=[(SMALL, 16)]))
    assert rows and check_report(rows, "rows") == []
    unknown = check_report([*rows, {"sm": 110, "unknown": True}], "rows")
    assert left_out(unknown, 2) == "left out, because the installed Triton cannot compile for it: sm_110"
    assert left_out([], 2) is None
    with pytest.raises(NotApplicable, match="compiles for none of the claimed chips: sm_110"):
        left_out(unknown, 1)
    check = dataclasses.replace(BY_NAME["targets"], run=lambda subject: "left out: sm_110")
    told = line(run_check(check, None))
    assert "ok" in told and "compiles for every chip" in told and "left out: sm_110" in told


def test_what_the_compiler_prints_is_no_part_of_the_report() -> None:
    """Triton prints the code that it could not lower, which begins with a brace too."""
    job = CompileJob(where_is(broken.ClaimsWhatDoesNotCompile), (75,), torch.float16, caches=[(SMALL, 16)])
    assert {row["sm"] for row in run_worker(job)} == {75}
