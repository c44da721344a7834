"""The conformance kit, the numbers of the format against its description, and both ways of running on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from qengine_nf4 import NF4Quant, NF4Scheme
from qengine_nf4.levels import LEVELS, pack, unpack
from qengine_nf4.quantizer import NF4Quantizer

from qengine.plugin import DeviceInfo, InputStats, LinearShard, LinearSpec
from qengine.plugin.conformance import WeightConformance

SPEC = LinearSpec("model.layers.0.mlp.up_proj", 101, 12)


class TestNF4(WeightConformance):
    plugin = NF4Quant
    targets = (75, 90)


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, 101, generator=torch.Generator().manual_seed(seed))


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """QLoRA's construction: the mean of neighbouring quantiles, 8 positive and 7 negative ones and a zero."""
    offset = 0.5 * (1 - 1 / 30 + 1 - 1 / 32)
    quantile = torch.distributions.Normal(0, 1).icdf
    positive = quantile(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -quantile(torch.linspace(offset, 0.5, 8)[:-1])
    want = torch.cat([positive, torch.zeros(1), negative]).sort().values
    assert torch.allclose(torch.tensor(LEVELS), want / want.max(), atol=2e-4)


def test_bits_of_a_file() -> None:
    packed = pack(torch.tensor([[1, 2, 15], [0, 8, 7]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F], [0x80, 0x07]]
    assert unpack(packed, 3).tolist() == [[1, 2, 15], [0, 8, 7]]


def test_the_nearest_level_is_taken() -> None:
    made = NF4Quantizer(32).quantize(SPEC, weight())
    scheme = NF4Scheme(32)
    back = scheme.dequantize(SPEC, made)
    scales = made["scales"].float().repeat_interleave(32, 1)[:, :101]
    choices = torch.tensor(LEVELS) * scales[..., None]
    nearest = choices.gather(-1, (choices - weight()[..., None]).abs().argmin(-1, keepdim=True))[..., 0]
    assert torch.equal(back, nearest)


def test_inputs_that_are_large_lose_less() -> None:
    quantizer, w = NF4Quantizer(64), weight()
    size = torch.ones(101)
    size[10] = 50
    plain = quantizer.quantize(SPEC, w)
    aware = quantizer.quantize_calibrated(SPEC, w, InputStats(100, size, size, None))
    off = [(NF4Scheme(64).dequantize(SPEC, made) - w)[:, 10].square().sum() for made in (plain, aware)]
    assert off[1] < off[0]


def test_packed_and_decoded_agree_on_a_cpu() -> None:
    made, x = NF4Quantizer(32).quantize(SPEC, weight()), torch.randn(3, 101)
    info, outs = DeviceInfo("cpu"), []
    for decode in (True, False):
        scheme = dataclasses.replace(NF4Scheme(32), decode=decode)
        op = scheme.bind([LinearShard(SPEC, dict(made))], torch.device("cpu"), info, torch.float32)
        assert op.nbytes == scheme.resident_bytes(SPEC, info, torch.float32)
        outs.append(op(x))
    assert torch.allclose(outs[0], outs[1], atol=1e-4)


@pytest.mark.parametrize("config", [{"group_size": 0}, {"group_size": "64"}, {"modules_to_not_convert": "lm_head"}])
def test_a_config_that_makes_no_sense_is_refused_by_field(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        NF4Quant.parse(config)
