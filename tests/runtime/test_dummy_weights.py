"""--load-format dummy: right shapes and formats, finite logits, the same weights for the same seed, no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from load_model import CPU
from qengine.errors import ConfigError
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.models.model import Model
from qengine.models.registry import build_model
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.dummy_weights import dummy_source
from qengine.runtime.loader import LoadPlan, load, resolve
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import select_quant
from torch_kv import PagedRun
from toy_models import awq_config, llama_config, write_json


def dummy(folder: Path, seed: int = 0, **config: object) -> tuple[Model, LoadPlan]:
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", llama_config(**config))
    checkpoint = Checkpoint.config_only(folder)
    choice = select_quant(None, checkpoint.quant)
    ctx = ModelContext(
        load_config(checkpoint), torch.device("cpu"), CPU, torch.float32, torch.float32, max_model_len=64
    )
    model = build_model(ctx)
    source = dummy_source(model.leaves, choice.quant, checkpoint.quant, torch.float16, seed, torch.device("cpu"))
    plan = resolve(model.leaves, source, choice.quant, choice.dense, CPU, torch.float32)
    load(plan)
    return model, plan


def logits(model: Model) -> torch.Tensor:
    run = PagedRun(model, [[1, 2, 3]])
    run.step([3])
    return run.logits[0][0]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
CONFIGS: dict[str, dict[str, object] | None] = {
    "16-bit": None,
    "awq": awq_config(64),
    "awq gemv": awq_config(64, version="gemv"),
    "awq gemv_fast": awq_config(64, version="gemv_fast"),
    "awq without zeros": awq_config(64, zero_point=False),
    "gptq": GPTQ,
    "gptq act-order": {**GPTQ, "desc_act": True},
    "gptq asymmetric": {**GPTQ, "sym": False},
    "gptq 3-bit": {**GPTQ, "bits": 3},
    "gptq 8-bit v2": {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_files(tmp_path: Path, name: str, tied: bool) -> None:
    quant = CONFIGS[name]
    extra = {"tie_word_embeddings": tied, "attention_bias": True} | ({"quantization_config": quant} if quant else {})
    model, plan = dummy(tmp_path, **extra)
    assert plan.warnings == [] and model.tied is tied
    quantised = sum(f != "16-bit" for f in plan.schemes.values())
    assert quantised == (14 if quant else 0)
    first = logits(model)
    assert torch.isfinite(first).all() and first.std() > 1e-3
    assert torch.equal(first, logits(dummy(tmp_path, **extra)[0]))
    assert not torch.equal(first, logits(dummy(tmp_path, seed=1, **extra)[0]))


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config])
def test_dummy_weights_have_the_spread_of_fresh_ones(tmp_path: Path, name: str) -> None:
    _, plan = dummy(tmp_path, quantization_config=CONFIGS[name])
    for leaf in (leaf for leaf, _ in plan.order if isinstance(leaf, Linear)):
        for spec, scheme in zip(leaf.specs, leaf.schemes, strict=True):
            tensors = {need.leaf: plan.source.read(f"{spec.name}.{need.leaf}") for need in scheme.tensors(spec)
                       if f"{spec.name}.{need.leaf}" in plan.source.tensors}  # fmt: skip
            weight = scheme.dequantize(spec, tensors)
            assert 0.01 < float(weight.std()) < 0.035 and abs(float(weight.mean())) < 0.006, spec.name


def test_modules_that_the_config_leaves_out_stay_dense(tmp_path: Path) -> None:
    for skips in (
        awq_config(64, modules_to_not_convert=["mlp"]),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["mlp.down_proj"]},
        {**GPTQ, "dynamic": {r"-:.*mlp\..*": {}}},
    ):
        _, plan = dummy(tmp_path / str(skips["quant_method"]), quantization_config=skips)
        dense = {name.rpartition(".")[2] for name, form in plan.schemes.items() if form == "16-bit"}
        assert "down_proj" in dense and "q_proj" not in dense and plan.warnings == []


def test_a_format_without_a_quantizer_is_refused() -> None:
    from qengine.plugin import WeightQuant
    from qengine_awq.backend import AwqQuant

    class ReadOnly(AwqQuant):
        dummy = WeightQuant.dummy

        @classmethod
        def quantizer(cls, **options: object) -> None:
            return None

    with pytest.raises(ConfigError, match="dummy cannot make awq weights"):
        dummy_source([], ReadOnly.parse(awq_config(64)), None, torch.float16, 0, torch.device("cpu"))
