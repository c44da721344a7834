"""Evaluations of toy models against transformers in float32: same figures, in every way of running them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_reference import reference_logits
from qengine.config import EngineConfig
from qengine.errors import CapacityError, ConfigError, UserError
from qengine.runtime.decide import Built
from qengine_calibration import evaluate as evaluate_module
from qengine_calibration.damage import end_to_end
from qengine_calibration.eval_text import TextSource
from qengine_calibration.evaluate import Evaluation, evaluate
from toy_models import llama_config, llama_tensors, make_bytetok, make_tiny, write_model

TEXT = "Nine bees hum over the old wall, and a tenth is late.\nIt always is. " * 8
WINDOW = 64


def nearby(folder: Path, noise: float, **config: Any) -> Path:
    """TINY with noise on its weights."""
    settings = llama_config(**config)
    gen = torch.Generator().manual_seed(1)
    tensors = {n: t + noise * t.std() * torch.randn(t.shape, generator=gen) for n, t in llama_tensors(settings).items()}
    return make_bytetok(write_model(folder, settings, tensors))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return make_tiny(root / "a"), nearby(root / "b", 0.1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return TextSource.open(str(path))


def config(folder: Path, **options: Any) -> EngineConfig:
    settings = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 24} | options
    return EngineConfig(model=str(folder), tokenizer=str(folder), **settings)


def run(text: TextSource, *configs: EngineConfig, **options: Any) -> Evaluation:
    return evaluate(configs, text, **{"max_tokens": 10_000, "window": WINDOW} | options)


def by_transformers(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    """float64 log-probabilities [positions, vocab] of what follows each token but the windows' last."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return torch.cat([r[:-1].double().log_softmax(-1) for r in reference_logits(model, windows)])


def test_figures_against_transformers(models: tuple[Path, Path], text: TextSource) -> None:
    ids = list((TEXT.rstrip("\n") + "\n\n").encode())
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    a, b = (by_transformers(m, windows) for m in models)
    follows = torch.tensor([t for w in windows for t in w[1:]])[:, None]
    kl = (a.exp() * (a - b)).sum(-1).numpy()
    s = run(text, *map(config, models)).summary()
    c = s["comparison"]
    assert s["a"]["perplexity"] == pytest.approx(float((-a.gather(1, follows)).mean().exp()), rel=1e-4)
    assert s["b"]["perplexity"] == pytest.approx(float((-b.gather(1, follows)).mean().exp()), rel=1e-4)
    assert c["kl_mean"] == pytest.approx(kl.mean(), rel=1e-3)
    assert c["kl_p99"] == pytest.approx(np.percentile(kl, 99), rel=1e-3)
    agreement = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    assert c["top1_agreement"] == pytest.approx(agreement, abs=1e-9) and 0.1 < agreement < 0.99
    assert s["data"]["tokens"] == len(ids) and s["data"]["positions"] == len(kl)
    # Figures that are nearly right: the other direction, the other percentile, tokens shifted by one.
    reverse = (b.exp() * (b - a)).sum(-1).numpy()
    assert c["kl_mean"] != pytest.approx(reverse.mean(), rel=1e-3)
    assert c["kl_p99"] != pytest.approx(np.percentile(kl, 98), rel=1e-3)
    shifted = torch.tensor([t for w in windows for t in w[:-1]])[:, None]
    assert s["a"]["perplexity"] != pytest.approx(float((-a.gather(1, shifted)).mean().exp()), rel=1e-4)


def test_one_after_the_other_gives_the_same(models: tuple[Path, Path], text: TextSource) -> None:
    one, two = (run(text, *map(config, models), one_at_a_time=flag) for flag in (False, True))
    assert one.summary()["comparison"] == two.summary()["comparison"]
    assert one.memory["engines_at_once"] == 2 and one.memory["temporary_file_bytes"] == 0
    assert two.memory["engines_at_once"] == 1
    assert two.memory["temporary_file_bytes"] == 4 * 320 * two.data["positions"]


def test_what_does_not_fit_beside_a_comes_after_it(
    models: tuple[Path, Path], text: TextSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = evaluate_module.decide, []

    def decide(c: EngineConfig) -> Built:
        asked.append(c.model)
        if len(asked) == 5:  # the first four are plans made before anything is loaded
            raise CapacityError("no room")
        return real(c)

    monkeypatch.setattr(evaluate_module, "decide", decide)
    said: list[str] = []
    e = run(text, *map(config, models), say=said.append)
    assert e.memory["engines_at_once"] == 1 and "one after the other" in said[0] and "temporary file" in said[0]
    assert e.kl is not None and e.kl.mean() > 0


def test_rows_are_bounded_and_change_nothing(
    models: tuple[Path, Path], text: TextSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(text, *map(config, models)).summary()["comparison"]
    seen: list[int] = []

    def compare(a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor) -> Any:
        seen.append(len(a))
        return real(a, b, targets)

    real = evaluate_module.compare
    monkeypatch.setattr(evaluate_module, "compare", compare)
    monkeypatch.setattr(evaluate_module, "LOGIT_BYTES", 5 * 4 * 320 * evaluate_module.ARRAYS)
    e = run(text, *map(config, models))
    assert max(seen) == 5 and e.memory["logit_rows"] == 5
    assert e.memory["logits_bytes"] == evaluate_module.LOGIT_BYTES
    assert e.summary()["comparison"] == pytest.approx(whole, rel=1e-4)


def test_kv_dtypes_of_one_model(models: tuple[Path, Path], text: TextSource) -> None:
    """Nothing differs: exactly nothing is lost. fp8 costs something, e5m2 with its two bits fewer costs more."""
    a = config(models[0])
    mean = {}
    for kv in ("auto", "fp8", "fp8_e5m2"):
        c = run(text, a, dataclasses.replace(a, kv_cache_dtype=kv)).summary()["comparison"]
        mean[kv] = c["kl_mean"]
        assert c["top1_agreement"] == 1 or kv != "auto"
    assert mean["auto"] == 0 < 1e-6 < mean["fp8"] < mean["fp8_e5m2"] / 2


def test_one_setting_alone(models: tuple[Path, Path], text: TextSource) -> None:
    s = run(text, config(models[0])).summary()
    assert s["b"] is None and s["comparison"] is None and s["a"]["perplexity"] > 1
    both = run(text, *map(config, models)).summary()
    assert s["a"] == both["a"]


def test_the_window_follows_the_model(tmp_path: Path, text: TextSource) -> None:
    small = make_tiny(tmp_path, max_position_embeddings=40)
    e = run(text, config(small), window=None)
    assert e.data["window"] == 40 and "instead of 1024" in e.notes[0]
    with pytest.raises(ConfigError, match="--window is longer than the context of"):
        run(text, config(small), window=41)


def test_the_window_stays_within_max_model_len(models: tuple[Path, Path], text: TextSource) -> None:
    """Asked for or not; a longer context is what the engines have, however short the windows are."""
    sides = [config(m, max_model_len=48) for m in models]
    e = run(text, *sides, window=None)
    assert e.data["window"] == 48 and [s["max_model_len"] for s in e.sides] == [48, 48]
    e = run(text, config(models[0], max_model_len=100))
    assert e.data["window"] == WINDOW and e.sides[0]["max_model_len"] == 100
    with pytest.raises(ConfigError, match="--window is longer than --max-model-len; have: 49 tokens; need: at most 48"):
        run(text, *sides, window=49)


def test_two_engines_stay_within_the_share_together(models: tuple[Path, Path], text: TextSource) -> None:
    plans, _ = evaluate_module.planned([config(m) for m in models], WINDOW)
    both, total = sum(b.memory.planned for b in plans), plans[0].memory.inputs.total
    for share, at_once in ((1.01, 2), (0.99, 1)):
        e = run(text, *(config(m, gpu_memory_utilization=share * both / total) for m in models))
        assert e.memory["engines_at_once"] == at_once


def test_max_memory_holds_for_engines_too(
    models: tuple[Path, Path], text: TextSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other where both are too much, none where one is; on a CPU the process as it is counts."""
    sides = [config(m) for m in models]
    plans, _ = evaluate_module.planned(sides, WINDOW)
    one, base = plans[0].memory.planned, 1 << 30
    monkeypatch.setattr(evaluate_module.devices, "allocated", lambda device: base)
    for most, at_once in ((2 * one, 2), (2 * one - 1, 1), (one, 1)):
        assert run(text, *sides, max_memory=base + most).memory["engines_at_once"] == at_once
    found = end_to_end(*sides, 400, max_memory=base + one - 1)
    assert found["not_measured"].startswith("--max-memory is too little for the whole model; have: 1.0")


def test_settings_are_described(models: tuple[Path, Path], text: TextSource) -> None:
    e = run(text, config(models[0]), config(models[0], kv_cache_dtype="fp8"))
    a, b = e.sides
    assert (a["kv_dtype"], a["kv_bytes_per_token"]) == ("auto", 2048)
    assert (b["kv_dtype"], b["kv_bytes_per_token"]) == ("fp8_e4m3", 512)
    assert e.data["sha256"] == text.sha256 and any("rests on the" in note for note in e.notes)
    assert (a["kv_scale_sources"], b["kv_scale_sources"]) == ("none", "2 x default 1.0")
    assert any(note.startswith("B: fp8_e4m3 KV cache without scales") for note in e.notes)


def test_figures_that_are_not_finite_end_it(tmp_path: Path, models: tuple[Path, Path], text: TextSource) -> None:
    broken = nearby(tmp_path, float("nan"))
    with pytest.raises(UserError, match="the figures of B are not finite from position 0"):
        run(text, config(models[0]), config(broken))


def test_other_vocabularies_are_refused(tmp_path: Path, models: tuple[Path, Path], text: TextSource) -> None:
    wide = make_tiny(tmp_path, vocab_size=384)
    with pytest.raises(ConfigError, match="different sizes; have: 320 and 384"):
        run(text, config(models[0]), config(wide))
