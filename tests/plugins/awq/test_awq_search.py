"""AWQ's searches on moments: the errors are the sampled ones, factors and clips pay, ties hold."""

from __future__ import annotations

import torch

from qengine.plugin import InputStats, LinearSpec, tie
from qengine_awq.backend import AwqScheme
from qengine_awq.quantizer import AwqQuantizer
from qengine_awq.search import group_moments

SPEC = LinearSpec("model.layers.0.mlp.up_proj", 256, 64)


def inputs() -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 256, generator=gen)
    x[:, ::40] *= 30
    return x


def stats(x: torch.Tensor) -> InputStats:
    return InputStats(len(x), x.abs().mean(0), x.abs().amax(0), x.t() @ x / len(x))


def weights(n: int = 64) -> torch.Tensor:
    return torch.randn(n, 256, generator=torch.Generator().manual_seed(1)) * 0.05


def meaning(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return AwqScheme(64, True).dequantize(SPEC, tensors)


def error(x: torch.Tensor, got: torch.Tensor) -> float:
    return float((x @ (got - weights()).t()).norm() / (x @ weights().t()).norm())


def test_moments_give_the_error_of_the_samples() -> None:
    x, d = inputs(), weights()
    assert abs(stats(x).output_error(d) / float((x @ d.t()).square().sum(1).mean()) - 1) < 1e-4
    f = torch.rand(256) + 0.5
    assert torch.allclose(stats(x).divided(f).moment, stats(x / f).moment, rtol=1e-3, atol=1e-3)  # type: ignore[arg-type]


def test_factors_and_calibrated_grids_pay() -> None:
    x, w, q = inputs(), weights(), AwqQuantizer(64)
    plain = error(x, meaning(q.quantize(SPEC, w)))
    clipped = error(x, meaning(q.quantize_calibrated(SPEC, w, stats(x))))
    f = q.input_factors([(SPEC, w)], stats(x), None)
    assert f is not None and (f > 0).all() and f[::40].min() > f[1:40].max()
    both = error(x, meaning(q.quantize_calibrated(SPEC, w * f, stats(x).divided(f))) / f)
    assert clipped < 0.8 * plain and both < 0.9 * clipped
    wrong = error(x, meaning(q.quantize_calibrated(SPEC, w / f, stats(x).divided(1 / f))) * f)
    assert wrong > both


def test_equal_channels_need_no_factors_and_ties_hold() -> None:
    q = AwqQuantizer(64)
    even = InputStats(1000, torch.ones(256), torch.ones(256), torch.eye(256))
    assert q.input_factors([(SPEC, weights())], even, None) is None
    channels = torch.arange(128).repeat(2)
    f = q.input_factors([(SPEC, weights())], stats(inputs()), channels)
    assert f is not None and torch.equal(f[:128], f[128:])
    assert torch.allclose(tie(torch.tensor([1.0, 4.0, 3.0]), torch.tensor([5, 5, 0])), torch.tensor([2.0, 2.0, 3.0]))


def test_silent_groups_fall_back_to_the_weights() -> None:
    x = inputs()
    x[:, 64:128] = 0
    moments = group_moments(stats(x), 64)
    assert torch.equal(moments[1], torch.eye(64))
    got = meaning(AwqQuantizer(64).quantize_calibrated(SPEC, weights(), stats(x)))
    want = meaning(AwqQuantizer(64).quantize(SPEC, weights()))
    assert torch.allclose(got[:, 64:128], want[:, 64:128], atol=1e-3) and torch.isfinite(got).all()
