"""GPTQ from dense weights: packing, grids, error compensation against a plain reference, odd inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gptq_files import pack_inputs, pack_outputs
from qengine.plugin import InputStats, LinearSpec, TensorInfo
from qengine_gptq.backend import GptqQuant
from qengine_gptq.layout import BITS, pack, pack_columns, unpack
from qengine_gptq.quantizer import GptqQuantizer
from qengine_gptq.rounding import gptq_codes, inverse_factor

SPEC = LinearSpec("model.layers.0.mlp.up_proj", 256, 64)
CODES = {torch.int32: "I32", torch.float16: "F16"}


def inputs(k: int = 256, tokens: int = 1500) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    mix = torch.eye(k) + 0.15 * torch.randn(k, k, generator=gen)
    return torch.randn(tokens, k, generator=gen) @ mix * torch.rand(k, generator=gen).mul(3).exp()


def stats(x: torch.Tensor) -> InputStats:
    return InputStats(len(x), x.abs().mean(0), x.abs().amax(0), x.t() @ x / len(x))


def weights() -> torch.Tensor:
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.05


def meaning(quantizer: GptqQuantizer, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    infos = {leaf: TensorInfo(leaf, CODES[t.dtype], tuple(t.shape)) for leaf, t in tensors.items()}
    scheme = GptqQuant.parse(quantizer.config([])).scheme_for(SPEC, infos)
    assert scheme is not None and not scheme.notes
    for need in scheme.tensors(SPEC):
        assert infos[need.leaf].shape == need.shape and infos[need.leaf].dtype in need.dtypes
    return scheme.dequantize(SPEC, tensors)


def output_error(quantizer: GptqQuantizer, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> float:
    w = weights()
    return float((x @ (meaning(quantizer, tensors) - w).t()).norm() / (x @ w.t()).norm())


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_the_formats(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (96, 32), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    assert torch.equal(pack(codes, bits), pack_inputs(codes, bits))
    assert torch.equal(pack_columns(codes, bits), pack_outputs(codes, bits))
    assert torch.equal(unpack(pack(codes, bits), bits, 96), codes)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compensation_beats_rounding(bits: int, symmetric: bool, act_order: bool) -> None:
    x, q = inputs(), GptqQuantizer(bits, 64, symmetric, act_order)
    plain = output_error(q, q.quantize(SPEC, weights()), x)
    found = q.quantize_calibrated(SPEC, weights(), stats(x))
    assert output_error(q, found, x) < 0.85 * plain
    assert (found["g_idx"].diff() < 0).any() == act_order
    # Wrong control: the statistics of other inputs compensate for nothing.
    other = stats(inputs().flip(1))
    assert output_error(q, q.quantize_calibrated(SPEC, weights(), other), x) > 1.05 * output_error(q, found, x)


def test_the_procedure_is_the_papers() -> None:
    """Column by column with the inverse of what is left of the Hessian (Frantar et al., equations 2 and 3), no blocks,
    no Cholesky: the same codes."""
    x = inputs(160, 900)
    moment = (x.t() @ x / len(x)).double()
    w = torch.randn(8, 160, generator=torch.Generator().manual_seed(2)) * 0.05
    codes, grid = gptq_codes(w, moment.float(), 160, 4, True, 0.01)
    damped = moment + torch.eye(160) * 0.01 * moment.diagonal().mean()
    left, inverse = w.double().clone(), torch.linalg.inv(damped)
    scale, zero = grid.scale[0].double(), grid.zero[0].double()
    same = 0
    for column in range(160):
        code = (left[:, column] / scale + zero).round().clamp(0, 15)
        same += int((code == codes[:, column]).sum())
        error = (left[:, column] - (code - zero) * scale) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column, column] = 1.0
    assert same > 0.99 * codes.numel()


def test_dead_inputs_and_singular_moments() -> None:
    x = inputs()
    x[:, 7] = 0
    x[:, 8] = x[:, 9]  # singular without damping
    q = GptqQuantizer(4, 64)
    tensors = q.quantize_calibrated(SPEC, weights(), stats(x))
    got, plain = (meaning(q, t) for t in (tensors, q.quantize(SPEC, weights())))
    assert torch.isfinite(got).all() and (got[:, 7] - weights()[:, 7]).abs().max() < 0.02
    assert float((x @ (got - weights()).t()).norm()) < float((x @ (plain - weights()).t()).norm())
    few = stats(x[:5])  # rank 5
    assert torch.isfinite(meaning(q, q.quantize_calibrated(SPEC, weights(), few))).all()


def test_chance_correlations_of_few_tokens_count_less() -> None:
    """On other inputs of the same kind, 300 tokens of unrelated channels are worth more when known to be few."""
    x, q = torch.randn(4000, 256, generator=torch.Generator().manual_seed(3)), GptqQuantizer(4, 64)
    few = stats(x[:300])
    careful = output_error(q, q.quantize_calibrated(SPEC, weights(), few), x[300:])
    trusting = output_error(q, q.quantize_calibrated(SPEC, weights(), replace(few, tokens=10**9)), x[300:])
    assert careful < 0.97 * trusting


def test_damping_is_raised_until_it_helps() -> None:
    moment = torch.eye(8)
    moment[0, 1] = moment[1, 0] = 1.2  # not positive definite: an eigenvalue of -0.2
    upper = inverse_factor(moment, 0.01)
    damped = 0.01 * 3**3
    assert torch.allclose(upper.t() @ upper, torch.linalg.inv(moment + damped * torch.eye(8)), atol=1e-4)
    moment[0, 1] = moment[1, 0] = 5.0
    with pytest.raises(ValueError, match="not positive definite"):
        inverse_factor(moment, 0.01)
    with pytest.raises(ValueError, match="all zero"):
        inverse_factor(torch.zeros(8, 8), 0.01)


def test_what_is_refused_or_left() -> None:
    for options in ({"bits": 5}, {"group_size": 0}, {"damping": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            GptqQuantizer(**options)  # type: ignore[arg-type]
    q = GptqQuantizer(4, 64)
    assert "head" in str(q.accepts(LinearSpec("lm_head", 256, 64)))
    assert q.accepts(LinearSpec("m", 96, 64)) == "have: 96 inputs; need: a multiple of group size 64"
    assert q.accepts(LinearSpec("m", 64, 96)) is None and q.accepts(SPEC) is None
    assert q.accepts(LinearSpec("m", 100, 64)) == "have: 100 inputs and 64 outputs; need: multiples of 32"
    assert q.accepts(LinearSpec("m", 64, 72)) == "have: 64 inputs and 72 outputs; need: multiples of 32"
    bad = weights()
    bad[3, 5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        q.quantize(SPEC, bad)
    rules = q.config(["lm_head", "model.layers.0.mlp.gate"])["dynamic"]
    parsed = GptqQuant.parse(q.config(["lm_head", "model.layers.0.mlp.gate"])).config
    assert list(rules) == [r"-:^model\.layers\.0\.mlp\.gate$"]
    assert list(parsed.matches("model.layers.0.mlp.gate")) == [None]
    assert list(parsed.matches("model.layers.0.mlp.gate_proj")) == []
