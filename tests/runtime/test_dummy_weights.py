"""--load-format dummy: right shapes and formats, finite logits, the same weights for the same seed, no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from load_model import CPU
from qengine.errors import ConfigError
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
    source = dummy_source(model.leaves, choice.quant, checkpoint.quant, torch.float16, seed)
    plan = resolve(model.leaves, source, choice.quant, choice.dense, CPU, torch.float32)
    load(plan)
    return model, plan


def logits(model: Model) -> torch.Tensor:
    run = PagedRun(model, [[1, 2, 3]])
    run.step([3])
    return run.logits[0][0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quant", [None, awq_config(64)], ids=["16-bit", "awq"])
def test_a_model_without_files(tmp_path: Path, quant: dict[str, object] | None, tied: bool) -> None:
    extra = {"tie_word_embeddings": tied, "attention_bias": True} | ({"quantization_config": quant} if quant else {})
    model, plan = dummy(tmp_path, **extra)
    assert plan.warnings == [] and model.tied is tied
    quantised = sum(f.startswith("awq") for f in plan.schemes.values())
    assert quantised == (14 if quant else 0)
    first = logits(model)
    assert torch.isfinite(first).all() and first.std() > 1e-3
    assert torch.equal(first, logits(dummy(tmp_path, **extra)[0]))
    assert not torch.equal(first, logits(dummy(tmp_path, seed=1, **extra)[0]))


def test_a_format_without_a_quantizer_is_refused() -> None:
    from qengine_awq.backend import AwqQuant

    class ReadOnly(AwqQuant):
        @classmethod
        def quantizer(cls, **options: object) -> None:
            return None

    with pytest.raises(ConfigError, match="dummy cannot make awq weights"):
        dummy_source([], ReadOnly.parse(awq_config(64)), None, torch.float16, 0)
