"""GPTQ through optimum's GPTQQuantizer: what it writes is read here, and what `qengine calibrate` writes it reads.

Runs where optimum and gptqmodel are installed, which optimum quantises through: `.ci/ecosystem gptqmodel`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from optimum.gptq import GPTQQuantizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_logits import meets_reference
from load_model import load_folder
from qengine_calibration.make import make_copy, weights_option
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from torch_kv import PagedRun
from toy_models import make_tiny

IDS = [[72, 101, 108, 108, 111, 256, 3, 200], [9, 8, 7, 6, 5, 4, 3, 2]]
LEAST = 0.999
"""Their CPU kernels compute in float16."""
ROWS = torch.randint(0, 250, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor(IDS)).logits.float()
    return out


def theirs(folder: Path) -> torch.nn.Module:
    """transformers reads GPTQ through optimum's GPTQQuantizer."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu").eval()
    return model


def ours(folder: Path) -> torch.Tensor:
    return torch.stack(PagedRun(load_folder(folder), IDS).run())


def say_what_is_stored(folder: Path) -> None:
    """optimum 2.3 converts symmetric zeros to v1 as it saves, and says so in quantize_config.json alone; by config.json
    transformers then reads noise. Here the zeros themselves tell."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = json.loads((folder / "quantize_config.json").read_text())["format"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("bits", "symmetric", "act_order"), [(4, True, True), (4, False, False), (8, True, False)])
def test_what_optimum_writes(bits: int, symmetric: bool, act_order: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path / "base", dtype="float16")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    data = [f"row {i} of the text that is calibrated with" for i in range(8)]
    quantizer = GPTQQuantizer(
        bits=bits, dataset=data, group_size=64, desc_act=act_order, sym=symmetric, model_seqlen=32,
        act_group_aware=not act_order,
    )
    made = quantizer.quantize_model(base, AutoTokenizer.from_pretrained(tmp_path / "base"))
    quantizer.save(made, str(tmp_path / "made"))
    got = ours(tmp_path / "made")
    say_what_is_stored(tmp_path / "made")
    assert meets_reference(got, logits_of(theirs(tmp_path / "made")), LEAST) is None
    assert torch.equal(got, ours(tmp_path / "made"))
    cosine = torch.cosine_similarity(got, ours(tmp_path / "base"), dim=-1)
    assert cosine.min() < 0.99999 and cosine.mean() > 0.9, "control: not quantised, or something else"


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (3, True), (8, True), (2, True)])
def test_what_calibrate_writes(bits: int, symmetric: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path / "base", dtype="float16")
    weights = weights_option("gptq", bits=bits, group_size=64, symmetric=symmetric)
    texts = Texts(ROWS, 32, "random ids", 8, 8, "random ids")
    make_copy(tmp_path / "base", tmp_path / "copy", texts, RunOptions(weights, device="cpu"))
    model = theirs(tmp_path / "copy")
    got = ours(tmp_path / "copy")
    assert meets_reference(got, logits_of(model), LEAST) is None
    with torch.no_grad():
        model.get_submodule("model.layers.1.post_attention_layernorm").weight.neg_()
    assert meets_reference(got, logits_of(model), LEAST) is not None
