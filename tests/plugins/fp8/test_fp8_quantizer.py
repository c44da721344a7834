"""FP8 from dense weights: scales per channel and per block, static activations, read back by the format's reader."""

from __future__ import annotations

import pytest
import torch

from qengine.plugin import InputStats, LinearScheme, LinearSpec, TensorInfo
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_fp8.backend import Fp8Quant
from qengine_fp8.quantizer import Fp8Quantizer, quantizer

CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


def scheme_of(q: Fp8Quantizer, spec: LinearSpec, tensors: dict[str, torch.Tensor]) -> LinearScheme:
    infos = {leaf: TensorInfo(leaf, CODES[t.dtype], tuple(t.shape)) for leaf, t in tensors.items()}
    config = q.config([])
    reader = {"fp8": Fp8Quant, "compressed-tensors": CompressedTensorsQuant}[config["quant_method"]].parse(config)
    scheme = reader.scheme_for(spec, infos)
    assert scheme is not None and not scheme.notes
    for need in scheme.tensors(spec):
        assert not need.required or (infos[need.leaf].shape == need.shape and infos[need.leaf].dtype in need.dtypes)
    return scheme


@pytest.mark.parametrize("shape", [(256, 256), (200, 384)])
@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_read_back(granularity: str, shape: tuple[int, int]) -> None:
    n, k = shape
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    w[:128, :128] *= 1e-3  # a scale for the whole would lose it
    w[-3:] *= 20
    spec, q = LinearSpec("model.layers.0.mlp.up_proj", k, n), quantizer(granularity)
    tensors = q.quantize(spec, w)
    scheme = scheme_of(q, spec, tensors)
    assert granularity in scheme.format or "blocks" in scheme.format
    got = scheme.dequantize(spec, tensors)
    assert ((got - w).abs() <= w.abs() / 16 + 2e-2 * w.abs().amax(1, keepdim=True)).all()
    part = slice(0, 128), slice(0, 128)
    error = float((got[part] - w[part]).norm() / w[part].norm())
    assert error < 0.05 if granularity == "block" else error > 0.02
    scale = tensors["weight_scale_inv" if granularity == "block" else "weight_scale"]
    assert scale.shape == ((-(-n // 128), -(-k // 128)) if granularity == "block" else (n, 1))


def test_zero_blocks_and_bad_values() -> None:
    spec, q = LinearSpec("m", 256, 128), quantizer("block")
    tensors = q.quantize(spec, torch.zeros(128, 256))
    assert (tensors["weight_scale_inv"] > 0).all() and not tensors["weight"].float().any()
    bad = torch.ones(128, 256)
    bad[0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        q.quantize(spec, bad)
    for options, message in (
        ({"granularity": "row"}, "granularity 'row'"),
        ({"activations": "none"}, "activations 'none'"),
        ({"granularity": "block", "activations": "static"}, "granularity channel, not block"),
    ):
        with pytest.raises(ValueError, match=message):
            quantizer(**options)


def test_static_activations() -> None:
    """The largest input becomes the largest code; an expert without tokens takes the others', a lonely one is refused,
    and zeros give a small scale, not 0 or 1."""
    spec, q = LinearSpec("model.layers.0.mlp.up_proj", 256, 128), quantizer("channel", "static")
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    x = torch.rand(40, 256)
    x[3, 7] = 89.6
    stats = InputStats(40, x.abs().mean(0), x.abs().amax(0))
    tensors = q.quantize_calibrated(spec, w, stats)  # type: ignore[attr-defined]
    assert tensors["input_scale"].tolist() == pytest.approx([0.2])
    assert "static activations" in scheme_of(q, spec, tensors).format
    assert torch.equal(tensors["weight"].float(), quantizer().quantize(spec, w)["weight"].float())
    assert q.quantize_cold(spec, w, stats)["input_scale"].tolist() == pytest.approx([0.2])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="too few tokens came by"):
        q.quantize_cold(spec, w, None)  # type: ignore[attr-defined]
    silent = q.quantize_calibrated(spec, w, InputStats(40, torch.zeros(256), torch.zeros(256)))  # type: ignore[attr-defined]
    assert 0 < float(silent["input_scale"]) < 1e-3
