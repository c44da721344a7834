"""Which steps run before the engine is ready: enough to meet every kernel, none that is larger than a step may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qengine.core.step import Step
from qengine.runtime.sampling_kernels import RowMax, TopFloor
from qengine.runtime.warmup import _check_sampling, step_sizes
from qengine_kernels import cpu_fused
from qengine_kernels.compile_watch import kernels_compiled
from qengine_kernels.row_max import row_max
from qengine_kernels.row_max.reference import row_max_reference
from qengine_kernels.top_floor import top_floor
from qengine_kernels.top_floor.reference import top_floor_reference
from toy_engine import request, run, toy_engine
from toy_models import make_tiny


@pytest.mark.parametrize("longest", [1, 15, 100, 5000, 131071])
@pytest.mark.parametrize("seqs", [1, 2, 40, 256, 1024])
@pytest.mark.parametrize("batched", [1, 7, 64, 8192])
def test_every_step_could_be_one_of_serving(batched: int, seqs: int, longest: int) -> None:
    steps = step_sizes(batched, seqs, longest)
    for lens in steps:
        assert 0 < sum(lens) <= batched and len(lens) <= seqs and max(lens) <= longest
        assert lens == sorted(lens, key=lambda n: n > 1), "decodes come first"
    assert [1] in steps
    reach = min(batched, seqs * longest)
    if seqs >= -(-batched // longest):
        assert max(map(sum, steps)) == reach, "the largest step is among them"


def test_each_class_of_sizes_is_met() -> None:
    steps = step_sizes(8192, 256, 100_000)
    for low in (1 << i for i in range(4, 13)):
        prefills = [s[0] for s in steps if len(s) == 1 and low <= s[0] < 2 * low]
        assert {n % 16 == 0 for n in prefills} == {True, False}
    decodes = {len(s) for s in steps if set(s) == {1}}
    assert {1, 2, 3, 16, 17, 256} <= decodes
    assert any(s[0] == 1 and s[-1] > 1 for s in steps) and any(len(s) > 1 and s[0] > 1 for s in steps)


def test_the_null_block_stays_zero_and_nothing_is_kept(tmp_path: Path) -> None:
    engine = toy_engine(make_tiny(tmp_path), max_num_seqs=2)
    assert all(not t[0].any() for t in engine.runner.cache.storage)
    assert engine.runner.inputs.rows == {} and engine.runner.prompt_logprobs == {}
    (line,) = [line for line in engine.facts.report if line.startswith("Fused CPU kernels")]
    assert "ready in" in line and cpu_fused.loaded() is not None
    out = run(engine, [request("r", [1, 2, 3], max_tokens=4)])
    assert len(out.ids["r"]) == 4


def test_maxima_that_are_not_those_of_torch_are_not_used(tmp_path: Path) -> None:
    runner = toy_engine(make_tiny(tmp_path), max_num_seqs=2).runner
    sampler = runner.sampler

    def wrong(change: str) -> RowMax:
        def find(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            best, places, checked = row_max_reference(x)
            if change == "last of equals":
                places = x.shape[1] - 1 - x.flip(1).argmax(1)
            elif change == "no word of infinities":
                checked = places
            elif change == "outside":
                places[3] = x.shape[1]
            return best, places, checked

        return find

    assert _check_sampling(runner) == [] and sampler.row_max is row_max
    for change in ("last of equals", "no word of infinities", "outside"):
        sampler.row_max = wrong(change)
        [line] = _check_sampling(runner)
        assert line.startswith("WARNING: maxima of logits are found by plain torch")
        assert sampler.row_max is row_max_reference and _check_sampling(runner) == []


def test_limits_that_are_not_those_of_torch_are_not_used(tmp_path: Path) -> None:
    """Wrong by one value, by an order of rows, and for ties alone."""
    runner = toy_engine(make_tiny(tmp_path), max_num_seqs=2).runner
    sampler = runner.sampler

    def wrong(change: str) -> TopFloor:
        def find(
            x: torch.Tensor, p: torch.Tensor, rows: torch.Tensor, most: int, top_k: torch.Tensor, top_p: torch.Tensor,
            floor: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            if change == "other rows":
                rows = rows.flip(0)
            elif change == "more":
                top_p = top_p * 1.01
            found = top_floor_reference(x, p, rows, most, top_k, top_p, floor)
            return found + 1e-4 if change == "less" else found

        return find

    assert _check_sampling(runner) == [] and sampler.top_floor is top_floor
    for change in ("other rows", "more", "less"):
        sampler.top_floor = wrong(change)
        [line] = _check_sampling(runner)
        assert line.startswith("WARNING: top_p sorts by plain torch")
        assert sampler.top_floor is top_floor_reference and _check_sampling(runner) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_serving_compiles_nothing(tmp_path: Path, eager: bool, kv: str) -> None:
    from toy_models import make_tiny_awq

    folder, _ = make_tiny_awq(tmp_path)
    engine = toy_engine(folder, device="cuda", dtype="half", kv_cache_dtype=kv, enforce_eager=eager,
                        kv_cache_memory_bytes=256 << 20)  # fmt: skip
    for count, length, new in ((1, 1, 3), (3, 40, 9), (40, 77, 20), (17, 700, 5), (200, 13, 4), (5, 1000, 3)):
        asked = [request(f"{count}-{i}", [(i + j) % 250 for j in range(length + i % 3)], max_tokens=new)
                 for i in range(count)]  # fmt: skip
        run(engine, asked)
    assert engine.stats().kernels_compiled == 0


def test_only_what_a_step_compiles_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what other engines of this process compile while they get ready, between two steps of this one."""
    engine = toy_engine(make_tiny(tmp_path))
    kernels_compiled().append("a kernel of another engine")
    run(engine, [request("a", [1, 2, 3], max_tokens=2)])
    assert engine.stats().kernels_compiled == 0
    launch = engine.runner.launch

    def compiles(step: Step) -> object:
        kernels_compiled().append("late_kernel")
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", compiles)
    run(engine, [request("b", [1, 2, 3], max_tokens=2)])
    assert engine.stats().kernels_compiled == 2
