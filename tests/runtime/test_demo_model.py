"""The real demo model, fetched by qengine itself into the user's cache: it answers, in 16 bits and in 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qengine.plugin import LinearSpec
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.demo import demo_folder
from qengine_awq.backend import AwqQuant
from qengine_calibration.prepared import prepared_copy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_folder()


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def answer(model: PreTrainedModel, folder: Path, question: str) -> str:
    tok = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    ids = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return tok.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_it_answers(model: PreTrainedModel, folder: Path) -> None:
    assert "Paris" in answer(model, folder, "What is the capital of France?")


def test_digits_have_ids_of_their_own(folder: Path) -> None:
    tok = AutoTokenizer.from_pretrained(folder)
    assert tok.convert_ids_to_tokens(tok("In 2024: 365").input_ids) == [
        "In", "Ġ", "2", "0", "2", "4", ":", "Ġ", "3", "6", "5",
    ]  # fmt: skip
    assert tok("<|im_start|>").input_ids == [1] and tok("<|im_end|>").input_ids == [2]


def test_the_four_bit_copy_answers_too(model: PreTrainedModel, folder: Path) -> None:
    """By the plain meaning of the copy's tensors, so that no kernel of ours stands between."""
    checkpoint = Checkpoint.open(prepared_copy(folder, "awq"))
    assert checkpoint.quant is not None and checkpoint.quant.config["group_size"] == 64
    quant = AwqQuant.parse(checkpoint.quant.config)
    weights = dict(model.state_dict())
    modules = [n.removesuffix(".qweight") for n in checkpoint.tensors if n.endswith(".qweight")]
    assert len(modules) == 30 * 7
    for module in modules:
        names = {leaf: f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales")}
        out, inner = weights[f"{module}.weight"].shape
        spec = LinearSpec(module, inner, out)
        scheme = quant.scheme_for(spec, {leaf: checkpoint.tensors[n] for leaf, n in names.items()})
        assert scheme is not None
        meaning = scheme.dequantize(spec, {leaf: checkpoint.read(n) for leaf, n in names.items()})
        weights[f"{module}.weight"].copy_(meaning)
    for name in checkpoint.tensors.keys() & weights.keys():
        weights[name].copy_(checkpoint.read(name).float())
    assert "Paris" in answer(model, folder, "What is the capital of France?")
