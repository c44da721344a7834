"""Calibration runs on toy models: folding changes nothing, statistics decide, killed runs go on, memory runs short."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Phi3Config, Qwen2Config, Qwen3Config

from calibration_models import lopsided_moe, outlier_tiny
from hf_reference import reference_model
from load_model import load_folder
from qengine.errors import CapacityError, CheckpointError, ConfigError
from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec
from qengine.plugin.discovery import load_plugin
from qengine.runtime.checkpoint import Checkpoint
from qengine_calibration import fold, run
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.layer import LayerQuantizer
from qengine_calibration.make import make_copy, weights_option, work_folder
from qengine_calibration.quantize import quantize_checkpoint
from qengine_calibration.run import RunOptions, Weights
from qengine_calibration.stream import LayerStream
from qengine_calibration.texts import Texts
from qengine_dense.backend import DenseQuant
from torch_kv import PagedRun
from toy_models import VOCAB, make_tiny
from toy_moe import make_moe

IDS = torch.randint(0, VOCAB, (64,), generator=torch.Generator().manual_seed(9)).tolist()


def texts(tokens: int = 200, length: int = 64, vocab: int = VOCAB, seed: int = 3) -> Texts:
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Texts([ids[i : i + length] for i in range(0, tokens, length)], length, "random ids", 1, 1, f"{seed}")


def logits(folder: Path) -> torch.Tensor:
    return PagedRun(load_folder(folder), [IDS]).run()[0]


class Scaler(CalibratedQuantizer):
    """A stranger's format: moves random factors into the producers and stores the weights as they are."""

    wants_moment = False

    def accepts(self, spec: LinearSpec) -> str | None:
        return None if ".layers." in spec.name else "not in a layer"

    def input_factors(
        self, readers: Sequence[tuple[LinearSpec, torch.Tensor]], stats: InputStats, channels: torch.Tensor | None
    ) -> torch.Tensor:
        assert all(len(stats.mean_abs) == spec.in_features == w.shape[1] for spec, w in readers)
        gen = torch.Generator().manual_seed(len(stats.mean_abs))
        own = torch.rand(len(stats.mean_abs) if channels is None else int(channels.max()) + 1, generator=gen) * 3 + 0.3
        return own if channels is None else own[channels]

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": weight.clone()}

    def quantize_calibrated(self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats) -> dict[str, torch.Tensor]:
        return self.quantize(spec, weight)

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        return {}


def toy(family: str, folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
    }  # fmt: skip
    if family in ("mixtral", "qwen2_moe"):
        make_moe(folder, family)
    elif family == "llama":
        make_tiny(folder, tokenizer=False, attention_bias=True)
    else:
        configs = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma2": Gemma2Config, "phi3": Phi3Config}
        reference_model(configs[family](**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen2_moe"])
def test_factors_in_every_feed_change_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toy(family, tmp_path / "source")
    options = RunOptions(Weights(DenseQuant, Scaler()), device="cpu")
    facts = make_copy(source, tmp_path / "copy", texts(), options)
    layers, feeds = 2, {"mixtral": 3 + 4, "qwen2_moe": 3 + 4 + 1}.get(family, 4)
    assert len(facts["factors"]) + len(facts["cold"]) >= layers * feeds and len(facts["factors"]) > 6
    want, got = logits(source), logits(tmp_path / "copy")
    assert torch.allclose(got, want, atol=2e-3 * want.abs().max())
    old, new = (Checkpoint.open(f) for f in (source, tmp_path / "copy"))
    assert set(old.tensors) == set(new.tensors)
    assert any(not torch.equal(old.read(n), new.read(n)) for n in old.tensors if "layernorm" in n)

    # Wrong control: rows that are not divided show.
    monkeypatch.setattr(fold, "_divide_rows", lambda *a: None)
    make_copy(source, tmp_path / "wrong", texts(), options)
    assert not torch.allclose(logits(tmp_path / "wrong"), want, atol=2e-2 * want.abs().max())


def damage(copy: Path, source: Path) -> float:
    want, got = logits(source), logits(copy)
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("method", "factor"), [("awq", 0.9), ("gptq", 0.8)])
def test_statistics_beat_the_weights_alone(method: str, factor: float, tmp_path: Path) -> None:
    source = outlier_tiny(tmp_path / "source")
    weights = weights_option(method, group_size=64)
    facts = make_copy(source, tmp_path / "copy", texts(3000), RunOptions(weights, device="cpu"))
    assert len(facts["linears"]) == 14 and all(f["tokens"] == 3000 for f in facts["linears"].values())
    quantize_checkpoint(source, tmp_path / "rounded", weights.quantizer)
    assert damage(tmp_path / "copy", source) < factor * damage(tmp_path / "rounded", source)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method


def test_the_reported_output_error_is_the_real_one(tmp_path: Path) -> None:
    """Of the first layer's q_proj, measured by hand on the same tokens."""
    source = make_tiny(tmp_path / "source")
    data = texts(500, 500)
    weights = weights_option("gptq", group_size=64)
    facts = make_copy(source, tmp_path / "copy", data, RunOptions(weights, device="cpu"))
    tensors = load_file(source / "model.safetensors")
    x = tensors["model.embed_tokens.weight"][torch.tensor(data.sequences[0])]
    x = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * tensors["model.layers.0.input_layernorm.weight"]
    name = "model.layers.0.self_attn.q_proj"
    w = tensors[f"{name}.weight"]
    spec, copy = LinearSpec(name, 256, 256), Checkpoint.open(tmp_path / "copy")
    own = {n.rpartition(".")[2]: n for n in copy.tensors if n.startswith(name + ".")}
    scheme = load_plugin("weight", "gptq").parse(copy.quant.config if copy.quant else None).scheme_for(
        spec, {leaf: copy.tensors[n] for leaf, n in own.items()}
    )  # fmt: skip
    assert scheme is not None
    meaning = scheme.dequantize(spec, {leaf: copy.read(n) for leaf, n in own.items()})
    real = float((x @ (meaning - w).t()).norm() / (x @ w.t()).norm())
    assert facts["linears"][name]["output_error"] == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of layer 1, when its first pass has been run; weights and KV scales in one pass."""
    source = outlier_tiny(tmp_path / "source", "float16")
    weights, kv = weights_option(method, group_size=64), KVOptions("fp8_e4m3")
    options = RunOptions(weights, kv, device="cpu")
    make_copy(source, tmp_path / "whole", texts(), options)
    layer, quantize = run.CalibrationRun._layer, LayerQuantizer.run
    ran: list[int] = []

    def counted(self: run.CalibrationRun, index: int) -> Any:
        ran.append(index)
        return layer(self, index)

    def cut(self: LayerQuantizer, *args: Any, **settings: Any) -> Any:
        if ran == [0, 1]:
            raise KeyboardInterrupt
        return quantize(self, *args, **settings)

    monkeypatch.setattr(run.CalibrationRun, "_layer", counted)
    monkeypatch.setattr(LayerQuantizer, "run", cut)
    target = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        make_copy(source, target, texts(), options)
    assert not target.exists() and work_folder(target).is_dir()
    said: list[str] = []
    make_copy(source, target, texts(), replace(options, resume=True), say=said.append)
    assert ran == [0, 1, 1] and any("going on behind layer 1" in line for line in said)
    for name in ("model.safetensors", "kv_scales.safetensors"):
        one, two = ((tmp_path / n / name).read_bytes() for n in ("whole", "cut"))
        assert one == two
    assert not work_folder(target).exists()


def test_other_text_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny(tmp_path / "source")
    weights = weights_option("awq", group_size=64)
    real = run.CalibrationRun._layer
    ran: list[int] = []

    def layer(self: run.CalibrationRun, index: int) -> Any:
        ran.append(index)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(run.CalibrationRun, "_layer", layer)
    with pytest.raises(KeyboardInterrupt):
        make_copy(source, tmp_path / "copy", texts(), RunOptions(weights, device="cpu"))
    make_copy(source, tmp_path / "copy", texts(seed=4), RunOptions(weights, device="cpu", resume=True))
    assert ran == [0, 1, 0, 1]


def test_short_memory_halves_the_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted twice: the same statistics as with small micro-batches from the start."""
    source = make_tiny(tmp_path / "source")
    weights = weights_option("gptq", group_size=64)
    small = make_copy(source, tmp_path / "small", texts(640), RunOptions(weights, device="cpu", tokens_at_once=128))
    sizes: list[int] = []
    real = LayerStream.forward

    def forward(self: LayerStream, layer: Any, residual: torch.Tensor, batch: Any) -> torch.Tensor:
        sizes.append(batch.tokens)
        out = real(self, layer, residual, batch)
        if batch.tokens > 160:
            raise torch.OutOfMemoryError("not enough")
        return out

    monkeypatch.setattr(LayerStream, "forward", forward)
    facts = make_copy(source, tmp_path / "copy", texts(640), RunOptions(weights, device="cpu"))
    assert sizes[0] == 640 and sizes[1] == 320 and max(sizes[2:]) <= 160
    assert {n: f["tokens"] for n, f in facts["linears"].items()} == dict.fromkeys(small["linears"], 640)
    for name, figures in facts["linears"].items():
        assert figures["output_error"] == pytest.approx(small["linears"][name]["output_error"], rel=1e-2)
    monkeypatch.setattr(LayerStream, "forward", lambda *a: (_ for _ in ()).throw(MemoryError("none left")))
    with pytest.raises(CapacityError, match="one sequence of 64 tokens"):
        make_copy(source, tmp_path / "none", texts(), RunOptions(weights, device="cpu"))


def test_experts_without_tokens_are_listed_and_finite(tmp_path: Path) -> None:
    lopsided_moe(tmp_path / "source")
    weights = weights_option("awq", group_size=32)
    facts = make_copy(tmp_path / "source", tmp_path / "copy", texts(400), RunOptions(weights, device="cpu"))
    cold = {n for n in facts["cold"] if "layers.0" in n}
    chosen = {n.split("experts.")[1][0] for n in facts["linears"] if "layers.0" in n and "experts" in n} - {
        n.split("experts.")[1][0] for n in cold
    }
    assert len(chosen) == 2 and len(cold) == 6 * 3 and set(facts["cold"].values()) == {0}
    for name, t in load_file(tmp_path / "copy" / "model.safetensors").items():
        if name.endswith("scales"):
            assert torch.isfinite(t).all() and (t > 0).all() and not (t == 1).all(), name


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source")
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        RunOptions()
    with pytest.raises(ConfigError, match="bits"):
        weights_option("gptq", bits=5)
    with pytest.raises(ConfigError, match="fp8 has no --zero-point"):
        weights_option("fp8", zero_point=True)
    weights = weights_option("awq", group_size=64)
    make_copy(source, tmp_path / "copy", texts(), RunOptions(weights, device="cpu"))
    with pytest.raises(ConfigError, match="is there already"):
        make_copy(source, tmp_path / "copy", texts(), RunOptions(weights, device="cpu"))
    with pytest.raises(CheckpointError, match="quantised already"):
        make_copy(tmp_path / "copy", tmp_path / "again", texts(), RunOptions(weights, device="cpu"))


def test_quantised_feed_and_plain_quantizers(tmp_path: Path) -> None:
    """fp8 sees weights only; with a quantised feed the second layer reads what the first one's copy makes."""
    source = outlier_tiny(tmp_path / "source")
    data, results = texts(), {}
    for feed in ("original", "quantised"):
        options = RunOptions(weights_option("awq", group_size=64), feed=feed, device="cpu")
        make_copy(source, tmp_path / feed, data, options)
        results[feed] = load_file(tmp_path / feed / "model.safetensors")
    first: Mapping[str, torch.Tensor] = results["original"]
    same = {n for n, t in first.items() if torch.equal(t, results["quantised"][n])}
    assert {n for n in first if "layers.0" in n} <= same
    assert any("layers.1" in n and n not in same for n in first)
    for name, chosen in (("channel", {}), ("block", {"granularity": "block"}), ("static", {"activations": "static"})):
        facts = make_copy(source, tmp_path / name, data, RunOptions(weights_option("fp8", **chosen), device="cpu"))
        assert damage(tmp_path / name, source) < 0.18
        # Errors of outputs are measured, on a sample, for formats that look at weights alone, too.
        assert all(0 < f["output_error"] < 0.05 and f["tokens"] == 200 for f in facts["linears"].values())


def test_static_activations_of_experts(tmp_path: Path) -> None:
    """Experts that no token reached take the largest scale of those that saw some: no zero, no 1."""
    lopsided_moe(tmp_path / "source")
    weights = weights_option("fp8", activations="static")
    facts = make_copy(tmp_path / "source", tmp_path / "copy", texts(400), RunOptions(weights, device="cpu"))
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    for part in ("w1", "w2", "w3"):
        names = [f"model.layers.0.block_sparse_moe.experts.{i}.{part}" for i in range(8)]
        scales = [float(tensors[f"{name}.input_scale"]) for name in names]
        warm = [s for name, s in zip(names, scales, strict=True) if name not in facts["cold"]]
        assert len(warm) == 2 and min(warm) > 0 and 1.0 not in scales
        assert [s for name, s in zip(names, scales, strict=True) if name in facts["cold"]] == [max(warm)] * 6
