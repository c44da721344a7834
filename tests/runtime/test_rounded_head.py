"""The 8-bit copy of a 16-bit output layer on a CPU: who gets one, that the plan knows, and what it costs in logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qengine_dense.backend
from load_model import plan_folder
from qengine.config import EngineConfig
from qengine.models.model import Model
from qengine.runtime.decide import decide
from qengine.runtime.loader import LoadPlan, load
from qengine_dense.backend import DenseQuant
from qengine_kernels.cpu_linear import CpuTuning
from qengine_kernels.testing import relative_error
from toy_models import llama_config, llama_tensors, make_bytetok, make_tiny, make_tiny_awq, write_model

ROWS = 3


@pytest.fixture(autouse=True)
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qengine_dense.backend, "tuning", lambda: CpuTuning("plain", 8, ROWS))


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    make_tiny_awq(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_tiny(folder, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16-bit weights with KV scales in the checkpoint, as `qengine calibrate --embed` and llm-compressor write them."""
    told = DenseQuant.with_kv_scales(None, "tensor")
    config = llama_config(dtype="bfloat16", quantization_config=told)
    tensors = {n: t.bfloat16() for n, t in llama_tensors(config).items()}
    tensors |= {f"model.layers.{i}.self_attn.{side}_scale": torch.ones(1) for i in (0, 1) for side in "kv"}
    return make_bytetok(write_model(tmp_path_factory.mktemp("embedded"), config, tensors))


def planned(folder: Path, **options: object) -> tuple[Model, LoadPlan]:
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", kv_cache_memory_bytes=1 << 20, **options)
    built = decide(config)
    return built.model, built.load_plan


def copied(plan: LoadPlan) -> list[str]:
    return [f for f in plan.bytes_by_format if "int8 copy" in f]


def test_quantised_models_get_a_copy_that_the_plan_counts(awq: Path) -> None:
    model, plan = planned(awq)
    (format_,) = copied(plan)
    assert f"up to {ROWS} rows" in format_
    assert any(n.startswith("lm_head: 16-bit with an int8 copy") and "--no-lm-head-int8" in n for n in plan.notes)
    loaded = load(plan)
    head = model.lm_head
    assert loaded.bytes_by_format == plan.bytes_by_format
    assert plan.bytes_by_format[format_] == head.out_features * (2 * head.in_features + head.in_features + 2)
    assert f"int8 copy per channel for up to {ROWS} rows on CPU" in head.ops[0].kernel


def test_nobody_else_does(awq: Path, plain: Path, embedded: Path) -> None:
    assert decide(EngineConfig(model=str(embedded), device="cpu")).choice.quant is not None
    for folder, options in (
        (plain, {}),
        (embedded, {}),
        (awq, {"lm_head_int8": False}),
        (awq, {"dtype": "float32"}),
    ):
        config = {"dtype": "bfloat16", **options}
        built = decide(EngineConfig(model=str(folder), device="cpu", kv_cache_memory_bytes=1 << 20, **config))
        assert not copied(built.load_plan), (folder, options)
        assert not any("int8 copy" in note for note in built.load_plan.notes)
    _, plan, _ = plan_folder(awq, dtype=torch.bfloat16)
    assert not copied(plan), "only who asks the loader for it"


def test_it_goes_when_memory_is_short(awq: Path) -> None:
    from qengine.runtime.decide import look_at

    seen = look_at(EngineConfig(model=str(awq), device="cpu", dtype="bfloat16"))
    small = seen.compacted()
    assert copied(seen.load_plan) and small is not None and not copied(small.load_plan)
    assert small.load_plan.total_bytes < seen.load_plan.total_bytes


def test_few_rows_of_logits_are_rounded_and_many_exact(awq: Path) -> None:
    pairs = [planned(awq), planned(awq, lm_head_int8=False)]
    for _, plan in pairs:
        load(plan)
    rounded, exact = (model for model, _ in pairs)
    hidden = torch.randn(ROWS + 1, exact.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        want = exact.logits(hidden)
        assert torch.equal(rounded.logits(hidden), want)
        few = rounded.logits(hidden[:ROWS])
        assert not torch.equal(few, want[:ROWS])
        assert relative_error(few, want[:ROWS]) < 0.01
        assert relative_error(few, want[1 : ROWS + 1]) > 0.5
