"""FP8 from dense weights: scales per channel and per block, read back by the plugin's own reader."""

from __future__ import annotations

import pytest
import torch

from qengine.plugin import LinearSpec, TensorInfo
from qengine_fp8.backend import Fp8Quant
from qengine_fp8.quantizer import Fp8Quantizer

CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


@pytest.mark.parametrize("shape", [(256, 256), (200, 384)])
@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_read_back(granularity: str, shape: tuple[int, int]) -> None:
    n, k = shape
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    w[:128, :128] *= 1e-3  # a scale for the whole would lose it
    w[-3:] *= 20
    spec, q = LinearSpec("model.layers.0.mlp.up_proj", k, n), Fp8Quantizer(granularity)
    tensors = q.quantize(spec, w)
    infos = {leaf: TensorInfo(leaf, CODES[t.dtype], tuple(t.shape)) for leaf, t in tensors.items()}
    scheme = Fp8Quant.parse(q.config([])).scheme_for(spec, infos)
    assert scheme is not None and granularity in scheme.format
    got = scheme.dequantize(spec, tensors)
    assert ((got - w).abs() <= w.abs() / 16 + 2e-2 * w.abs().amax(1, keepdim=True)).all()
    part = slice(0, 128), slice(0, 128)
    error = float((got[part] - w[part]).norm() / w[part].norm())
    assert error < 0.05 if granularity == "block" else error > 0.02
    scale = tensors["weight_scale_inv" if granularity == "block" else "weight_scale"]
    assert scale.shape == ((-(-n // 128), -(-k // 128)) if granularity == "block" else (n, 1))


def test_zero_blocks_and_bad_values() -> None:
    spec, q = LinearSpec("m", 256, 128), Fp8Quantizer("block")
    tensors = q.quantize(spec, torch.zeros(128, 256))
    assert (tensors["weight_scale_inv"] > 0).all() and not tensors["weight"].float().any()
    bad = torch.ones(128, 256)
    bad[0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        q.quantize(spec, bad)
    with pytest.raises(ValueError, match="granularity 'row'"):
        Fp8Quantizer("row")
