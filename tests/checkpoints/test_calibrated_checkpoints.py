"""Models that real tools trained and wrote go through every scheme that `qengine calibrate` makes: transformers, on the
weights that the copy's tensors mean, gives the logits that qengine gives on the copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_logits import folders, load_logits, meets_reference, reference_logits
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.quant_select import select_quant
from qengine_calibration.make import make_copy, weights_option
from qengine_calibration.quantize import linear_specs
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts

SCHEMES: dict[str, tuple[str, dict[str, Any], float]] = {
    "awq": ("awq", {"group_size": 128}, 0.7),
    "awq-symmetric": ("awq", {"group_size": 64, "zero_point": False}, 0.7),
    "gptq-2bit": ("gptq", {"group_size": 32, "bits": 2, "symmetric": False}, 0.1),
    "gptq-3bit": ("gptq", {"group_size": 64, "bits": 3}, 0.4),
    "gptq-4bit": ("gptq", {"group_size": 128}, 0.7),
    "gptq-4bit-asymmetric": ("gptq", {"group_size": 64, "symmetric": False, "act_order": False}, 0.7),
    "gptq-8bit": ("gptq", {"group_size": 128, "bits": 8}, 0.999),
    "fp8-channel": ("fp8", {}, 0.99),
    "fp8-static": ("fp8", {"activations": "static"}, 0.99),
    "fp8-block": ("fp8", {"granularity": "block"}, 0.99),
}
"""Format, options, and the least mean cosine with the 16-bit model's logits."""


def dequantised(copy: Path, source: Path) -> torch.nn.Module:
    """transformers' model of the source with the copy's weights, by their plain meaning."""
    checkpoint, base = Checkpoint.open(copy), Checkpoint.open(source)
    quant = select_quant(None, checkpoint.quant).quant
    assert quant is not None
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = model.state_dict()
    specs, _ = linear_specs(base)
    for name in base.tensors:
        if name in checkpoint.tensors and name not in specs:
            state[name].copy_(checkpoint.read(name))
    for spec in specs.values():
        own = {n.rpartition(".")[2]: n for n in checkpoint.tensors if n.rpartition(".")[0] == spec.name}
        scheme = quant.scheme_for(spec, {leaf: checkpoint.tensors[n] for leaf, n in own.items()})
        tensors = {leaf: checkpoint.read(n) for leaf, n in own.items()}
        meaning = tensors["weight"] if scheme is None else scheme.dequantize(spec, tensors)
        state[f"{spec.name}.weight"].copy_(meaning)
        if "bias" in tensors:
            state[f"{spec.name}.bias"].copy_(tensors["bias"])
    return model.eval()


@pytest.mark.parametrize("name", folders("base"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip(scheme: str, name: str, checkpoints: Path, tmp_path: Path) -> None:
    source, copy = checkpoints / name, tmp_path / "copy"
    ids = load_file(source / "reference.safetensors")["input_ids"]
    vocab = reference_logits(source).shape[-1]
    rows = torch.randint(0, vocab, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
    method, options, least = SCHEMES[scheme]
    texts = Texts(rows, 64, "random ids", 8, 8, "random ids")
    make_copy(source, copy, texts, RunOptions(weights_option(method, **options), device="cpu"))
    (copy / "reference.safetensors").write_bytes((source / "reference.safetensors").read_bytes())
    got, report = load_logits(copy)
    assert not report.warnings
    with torch.inference_mode():
        want = dequantised(copy, source)(ids).logits
    assert meets_reference(got, want) is None
    base = reference_logits(source)
    assert least < float(torch.cosine_similarity(got, base, dim=-1).mean()) < 0.9999999
    # Control: the weights before are told apart from those of the copy.
    assert not torch.allclose(got, base, atol=1e-3)
