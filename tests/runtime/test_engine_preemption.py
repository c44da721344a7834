"""CASES C21: a pool that is too small for all requests preempts, and every story still ends as it does alone."""

from pathlib import Path

import pytest
import torch

from qengine.runtime.engine import Engine
from toy_engine import Run, request, run, toy_engine
from toy_models import make_succ, make_tiny

PROMPT, NEW, BLOCK, POOL = 20, 60, 16, 6


def small_engine(folder: Path, blocks: int = POOL) -> Engine:
    probe = toy_engine(folder)
    per_block = probe.runner.cache.nbytes // probe.runner.cache.storage[0].shape[0]
    return toy_engine(folder, kv_cache_memory_bytes=blocks * per_block, max_model_len=PROMPT + NEW)


def prompts(n: int = 4) -> list[list[int]]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(0, 250, (PROMPT,), generator=gen).tolist() for _ in range(n)]


def crowd(folder: Path, **sampling: float) -> Run:
    engine = small_engine(folder)
    out = run(engine, [request(f"r{i}", p, max_tokens=NEW, ignore_eos=True, **sampling)
                       for i, p in enumerate(prompts())])
    assert engine.stats().num_preemptions > 0
    return out


def test_succ_ids_are_those_of_solo_runs(tmp_path: Path) -> None:
    folder = make_succ(tmp_path)
    together = crowd(folder)
    for i, p in enumerate(prompts()):
        expected = [(p[-1] + 1 + j) % 320 for j in range(NEW)]
        assert together.ids[f"r{i}"] == expected
        assert together.last[f"r{i}"].finish_reason == "length"


def test_tiny_ids_are_those_of_solo_runs(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    together = crowd(folder)
    alone = toy_engine(folder)
    for i, p in enumerate(prompts()):
        solo = run(alone, [request("solo", p, max_tokens=NEW, ignore_eos=True)])
        assert together.ids[f"r{i}"] == solo.ids["solo"]


def test_seeded_sampling_survives_preemption(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    together = crowd(folder, temperature=0.8, seed=5)
    alone = toy_engine(folder)
    for i, p in enumerate(prompts()):
        solo = run(alone, [request("solo", p, max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=5)])
        assert together.ids[f"r{i}"] == solo.ids["solo"]
        assert together.last[f"r{i}"].finish_reason == "length"


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers(tmp_path: Path) -> None:
    engine = small_engine(make_tiny(tmp_path), blocks=POOL)
    out = run(engine, [request("big", range(70), max_tokens=NEW), request("ok", range(10), max_tokens=4)])
    assert out.last["big"].finish_reason == "error"
    assert "130" in (out.last["big"].error or "") and str(PROMPT + NEW) in (out.last["big"].error or "")
    assert len(out.ids["ok"]) == 4


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_any_pool_that_holds_one_request_finishes_all(tmp_path: Path, blocks: int) -> None:
    engine = small_engine(make_succ(tmp_path), blocks=max(blocks, 5))
    out = run(engine, [request(f"r{i}", p, max_tokens=NEW, ignore_eos=True) for i, p in enumerate(prompts(3))])
    assert all(len(out.ids[f"r{i}"]) == NEW for i in range(3))
