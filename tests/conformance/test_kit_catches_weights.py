"""The kit sees what a weight format can do wrong, by the check that is meant for it, and says what it saw."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import broken_weights as broken
from qengine.conformance.kit import CheckFailed
from qengine.conformance.places import places
from qengine.conformance.weight_suite import WEIGHT_CHECKS, WeightSubject
from qengine.plugin import LinearSpec, WeightSample
from qengine_gptq.backend import GptqQuant

BY_NAME = {check.name: check for check in WEIGHT_CHECKS}
# CUDA code runs on a GPU where there is one: the interpreter would be on for all other tests of this process too.
EVERYWHERE = places(gpu=torch.cuda.is_available())
ON_CPU = EVERYWHERE[:1]


def act_order_sample() -> WeightSample:
    """Two groups of 32 inputs whose members are scattered."""
    quantizer = GptqQuant.quantizer(group_size=32)
    assert quantizer is not None
    spec = LinearSpec("model.layers.0.mlp.up_proj", 64, 32)
    tensors = quantizer.quantize(spec, torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    return WeightSample(quantizer.config([]), spec, tensors | {"g_idx": tensors["g_idx"][order].contiguous()})


CASES = [
    (broken.InheritsNoVersion, "contract", "none stated"),
    (broken.ForgetsATensor, "headers", "tensors.. does not know qzeros"),
    (broken.RefusesSilently, "capability", "refused without a reason"),
    (broken.ClaimsBfloat16OnTuring, "capability", "sm_75 has no bfloat16"),
    (broken.TakesNaNScales, "scales", "bind takes scales = nan"),
    (broken.ScalesTwiceTooLarge, "quantizer", "is off by"),
    (broken.QuantizesNaN, "quantizer", "takes a weight with NaN"),
    (broken.MisnamesItsMethod, "quantizer", "quant_method 'another'"),
    (broken.SplitsTheWrongWay, "sharding", r"qweight I32 \[64, 8\]"),
    (broken.InvertedScale, "products", "differ from x @ dequantize.T"),
    (broken.ZeroOffByOne, "products", "differ from x @ dequantize.T"),
    (broken.LosesTheLastInput, "products", r"weight \[\d+, 127\] acts as 0|differ from"),
    (broken.ChangesItsInput, "products", "changes its input"),
    (broken.FusesTheFirstOnly, "fused", "two shards"),
    (broken.NotDeterministic, "determinism", "gives other bits"),
    (broken.LiesAboutBytes, "bytes", r"resident_bytes says \d+, the op's buffers hold \d+"),
    (broken.HidesADenseCopy, "buffers", "does not list"),
    (broken.HidesADenseCopy, "offload", "kept elsewhere"),
    (broken.KeepsAView, "offload", "a view or a copy of one is kept"),
]


@pytest.mark.parametrize(("plugin", "check", "says"), CASES, ids=lambda v: getattr(v, "__name__", None))
def test_a_broken_format_is_caught_by_the_check_for_it(plugin: Any, check: str, says: str) -> None:
    with pytest.raises((CheckFailed, RuntimeError, ValueError)) as caught:
        BY_NAME[check].run(WeightSubject(plugin, ON_CPU))
    assert re.search(says, str(caught.value)), caught.value


def test_a_kernel_with_another_nibble_order_is_caught() -> None:
    with pytest.raises(CheckFailed, match=r"on (interpreter|gpu) .* differ from x @ dequantize.T"):
        BY_NAME["products"].run(WeightSubject(broken.WrongNibbleOrder, EVERYWHERE[1:]))


def test_a_format_that_ignores_g_idx_is_caught_and_the_real_one_is_not() -> None:
    sample = [act_order_sample()]
    with pytest.raises(CheckFailed, match=r"differ from x @ dequantize.T"):
        BY_NAME["products"].run(WeightSubject(broken.IgnoresGroupIndex, ON_CPU, sample))
    BY_NAME["products"].run(WeightSubject(GptqQuant, ON_CPU, sample))


def test_a_claim_that_the_compiler_denies_is_caught() -> None:
    with pytest.raises(CheckFailed, match=r"sm_75 is claimed, but .* does not compile for it"):
        BY_NAME["targets"].run(WeightSubject(broken.ClaimsWhatDoesNotCompile, ON_CPU, targets=(75,)))
