"""Dense weights to AWQ tensors: error bounds, what the format needs, and what is left dense."""

import pytest
import torch

from qengine.plugin import LinearSpec, TensorInfo
from qengine_awq.backend import AwqQuant, AwqScheme
from qengine_awq.layout import unpack
from qengine_awq.quantizer import AwqQuantizer
from qengine_kernels.testing import relative_error

CODES = {torch.int32: "I32", torch.float16: "F16"}


def weights(n: int = 64, k: int = 256) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(n, k) * torch.rand(n, 1) * 0.1


def rounded_to_nearest(w: torch.Tensor, group: int) -> torch.Tensor:
    """The plain way, without search: grid over each group's range."""
    parts = w.view(w.shape[0], -1, w.shape[1] if group == -1 else group)
    low, high = parts.amin(2, True).clamp_max(0), parts.amax(2, True).clamp_min(0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    return (((parts / scale + zero).round().clamp(0, 15) - zero) * scale).view_as(w)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_error_is_below_plain_rounding(group: int) -> None:
    w, spec = weights(), LinearSpec("up_proj", 256, 64)
    tensors = AwqQuantizer(group).quantize(spec, w)
    got = AwqScheme(group, True).dequantize(spec, tensors)
    error, plain = relative_error(got, w), relative_error(rounded_to_nearest(w, group), w)
    assert error < plain
    assert error < {32: 0.085, 64: 0.095, 128: 0.105, -1: 0.115}[group]
    shifted = tensors | {"qzeros": tensors["qzeros"] + 0x11111111}  # every zero one too large, as GPTQ would read it
    assert relative_error(AwqScheme(group, True).dequantize(spec, shifted), w) > 3 * error


def test_symmetric_without_zeros() -> None:
    w, spec = weights(), LinearSpec("up_proj", 256, 64)
    tensors = AwqQuantizer(64, zero_point=False).quantize(spec, w)
    assert set(tensors) == {"qweight", "scales"}
    assert relative_error(AwqScheme(64, False).dequantize(spec, tensors), w) < 0.11


def test_tensors_and_config_read_back() -> None:
    spec = LinearSpec("model.layers.0.mlp.up_proj", 256, 64)
    quantizer = AwqQuant.quantizer(group_size=64)
    assert quantizer is not None
    tensors = quantizer.quantize(spec, weights().bfloat16())
    config = quantizer.config(["lm_head"])
    assert config == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    headers = {leaf: TensorInfo(leaf, CODES[t.dtype], tuple(t.shape)) for leaf, t in tensors.items()}
    scheme = AwqQuant.parse(config).scheme_for(spec, headers)
    assert scheme is not None
    for need in scheme.tensors(spec):
        assert headers[need.leaf].shape == need.shape and headers[need.leaf].dtype in need.dtypes
    assert all(t.is_contiguous() for t in tensors.values())


def test_odd_groups_keep_their_meaning() -> None:
    """All zero, one-sided, tiny and constant groups: finite positive scales and small errors."""
    w = torch.zeros(8, 64)
    w[1] = 0.01 + torch.rand(64) * 0.01
    w[2] = -w[1]
    w[3] = 1e-5 * torch.randn(64)
    w[4] = 0.25
    w[5, 7] = 3.0
    spec = LinearSpec("up_proj", 64, 8)
    tensors = AwqQuantizer(32).quantize(spec, w)
    assert torch.isfinite(tensors["scales"]).all() and (tensors["scales"] > 0).all()
    got = AwqScheme(32, True).dequantize(spec, tensors)
    assert (got[0] == 0).all()
    for row in (1, 2, 4, 5):
        assert relative_error(got[row], w[row]) < 0.06
    assert got[3].abs().max() < 1e-4


def test_weights_already_on_a_grid_come_back_exactly() -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 16, (16, 64)).float()
    codes[:, 0], codes[:, 1], codes[:, 32], codes[:, 33] = 0, 15, 0, 15
    w = (codes - 6) * 0.03125
    tensors = AwqQuantizer(32).quantize(LinearSpec("m", 64, 16), w)
    assert torch.equal(AwqScheme(32, True).dequantize(LinearSpec("m", 64, 16), tensors), w)
    assert torch.equal(unpack(tensors["qzeros"]), torch.full((2, 16), 6, dtype=torch.uint8))


@pytest.mark.parametrize(
    "spec, word",
    [
        (LinearSpec("lm_head", 256, 64), "head"),
        (LinearSpec("m", 96, 64), "96"),
        (LinearSpec("m", 128, 60), "60"),
    ],
)
def test_what_stays_dense_is_said(spec: LinearSpec, word: str) -> None:
    quantizer = AwqQuantizer(64)
    reason = quantizer.accepts(spec)
    assert reason is not None and word in reason
    with pytest.raises(ValueError, match=word):
        quantizer.quantize(spec, torch.zeros(spec.out_features, spec.in_features))
    assert quantizer.accepts(LinearSpec("model.layers.0.mlp.down_proj", 128, 64)) is None


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size 0"):
        AwqQuantizer(0)
    w = weights()
    w[3, 5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        AwqQuantizer(64).quantize(LinearSpec("m", 256, 64), w)
