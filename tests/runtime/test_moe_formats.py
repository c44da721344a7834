"""Mixtures of experts in the formats beside AWQ, written by the tests' own packers, against transformers over the dense
weights that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint_logits import meets_reference
from compressed_tensors_files import (
    FP8_DYNAMIC,
    INT8_DYNAMIC,
    fp8_tensors,
    fp8_weights,
    group_of,
    int_tensors,
    quant_config,
    weights,
)
from fp8_files import pack_block, pack_tensor
from gptq_files import Style, config_of, quantize
from gpu_logits import gpu_info, gpu_logits
from hf_reference import random_sequences, reference_logits
from load_model import plan_folder
from qengine.layers.moe import ExpertLinear, Router
from qengine.runtime.loader import load
from torch_kv import PagedRun
from toy_models import write_json
from toy_moe import FAMILIES, make_moe

SEQUENCES = random_sequences((9, 4))
ROUTERS = (".gate", ".shared_expert_gate")
ORDERED = Style(8, 32, symmetric=False, stored="gptq_v2", shuffle=3)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def static(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors, meaning = pack_tensor(weight)
    return tensors | {"input_scale": torch.tensor(0.02)}, meaning


FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (partial(quantize, style=Style(4, 32)), config_of(Style(4, 32))),
    "gptq-act-order": (partial(quantize, style=ORDERED), config_of(ORDERED)),
    "fp8-static": (static, FP8 | {"activation_scheme": "static"}),
    "fp8-block": (partial(pack_block, block=(64, 32)), FP8 | {"weight_block_size": [64, 32]}),
    "w4a16": (
        partial(int_tensors, bits=4, group=32, symmetric=False),
        quant_config(group_of(weights(4, "group", 32, symmetric=False))),
    ),
    "fp8-dynamic": (
        partial(fp8_tensors, strategy="channel"),
        quant_config(group_of(fp8_weights("channel"), inputs=FP8_DYNAMIC), form="float-quantized"),
    ),
    "w8a8": (
        partial(int_tensors, bits=8, group=-1, layout="bytes"),
        quant_config(group_of(weights(8, "channel"), inputs=INT8_DYNAMIC), form="int-quantized"),
    ),
}

# Qwen2-MoE's experts are Qwen3-MoE's; what it has beside them is an expert that all tokens share.
CASES = [(family, name) for family in FAMILIES for name in FORMATS if family != "qwen2_moe" or "block" in name]


def write(folder: Path, family: str, name: str) -> PreTrainedModel:
    """A toy whose layers' linears but the routers are in the format, and the model that it means. Every token takes all
    experts, so that rounding cannot pick others."""
    pack, config = FORMATS[name]
    make_moe(folder, family, num_experts_per_tok=4)
    held: dict[str, torch.Tensor] = {}
    meaning = load_file(folder / "model.safetensors")
    for tensor, value in list(meaning.items()):
        module = tensor.removesuffix(".weight")
        if value.dim() == 2 and ".layers." in tensor and not module.endswith(ROUTERS):
            parts, meaning[tensor] = pack(value)
            held |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
        else:
            held[tensor] = value
    save_file({n: t.contiguous() for n, t in meaning.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_file({n: t.contiguous() for n, t in held.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", settings | {"quantization_config": config})
    return reference


def assert_means(got: list[torch.Tensor], reference: PreTrainedModel, cosine: float) -> None:
    """At `cosine`; and experts that change places must show."""

    def problem() -> str | None:
        pairs = zip(got, reference_logits(reference, SEQUENCES), strict=True)
        return next((text for g, w in pairs if (text := meets_reference(g, w, cosine))), None)

    assert problem() is None, problem()
    with torch.no_grad():
        stacked = reference.get_parameter("model.layers.1.mlp.experts.down_proj")
        stacked.copy_(stacked.roll(1, 0))
    assert problem() is not None, "control"


@pytest.mark.parametrize(("family", "name"), CASES)
def test_experts_mean_their_dequantised_weights(family: str, name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, family, name)
    model, plan, _ = plan_folder(tmp_path)
    experts = {
        plan.schemes[spec.name] for leaf in model.leaves if isinstance(leaf, ExpertLinear) for spec in leaf.specs
    }
    assert len(experts) == 1 and "16-bit" not in experts
    assert {plan.schemes[leaf.name] for leaf in model.leaves if isinstance(leaf, Router)} == {"16-bit"}
    assert load(plan).warnings == plan.warnings == []
    # What is rounded along the way is W8A8's activations.
    assert_means(PagedRun(model, SEQUENCES).run(3), reference, 0.99 if name == "w8a8" else 0.99999)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), CASES)
def test_grouped_on_a_gpu(family: str, name: str, tmp_path: Path) -> None:
    """All experts at once; FP8 weight-only, as experts always are."""
    reference = write(tmp_path, family, name)
    got, _, report = gpu_logits(tmp_path, SEQUENCES, torch.float16, info=gpu_info((8, 6)))
    assert any("all experts at once" in kernel for kernel in report.kernels), dict(report.kernels)
    assert_means([logits.cpu() for logits in got], reference, 0.99 if name == "w8a8" else 0.999)
