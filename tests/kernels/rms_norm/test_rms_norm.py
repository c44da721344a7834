"""RMS norm against float32 torch."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from qengine_kernels.rms_norm import rms_norm
from qengine_kernels.rms_norm.kernel import launch_rms_norm
from qengine_kernels.rms_norm.reference import rms_norm_reference
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


SHAPES = [(1, 1), (5, 576), (3, 4096), (2, 5000), (0, 64), (7, 3, 80)]


@pytest.mark.parametrize(("shape", "offset", "dtype"), covering(SHAPES, [0.0, 1.0], [*LIMITS]))
def test_matches_reference(
    shape: tuple[int, ...], offset: float, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = torch.randn(shape).to(dtype).to(device), torch.randn(shape[-1]).to(dtype).to(device)
    with poisoned_empty():
        got = launch_rms_norm(x, weight, 1e-6, weight_offset=offset)
    want = rms_norm_reference(x.float(), weight.float(), 1e-6, weight_offset=offset)
    assert got.dtype == dtype
    assert_close("norm", got, want, LIMITS[dtype])


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
@DTYPES
def test_residual_is_updated_in_place(
    dtype: torch.dtype, residual_dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = torch.randn(4, 200).to(dtype).to(device), torch.randn(200).to(dtype).to(device)
    residual = (torch.randn(4, 200) * 3).to(residual_dtype).to(device)
    expected = residual.clone()
    with poisoned_empty():
        got = launch_rms_norm(x, weight, 1e-5, residual)
    want = rms_norm_reference(x, weight, 1e-5, expected, dtype=torch.float32)
    assert_close("residual", residual, expected, 1e-6)
    assert_close("norm", got, want, LIMITS[dtype])
    with pytest.raises(KernelMismatch):
        assert_close("without the residual", got, rms_norm_reference(x, weight, 1e-5), 0.1)


def test_head_views_and_result_dtype(device: torch.device) -> None:
    """The q/k norm reads heads out of a fused qkv; a float32 residual stream yields a float16 result."""
    fused = torch.randn(6, 5, 96, device=device)
    weight = torch.randn(96, device=device)
    got = launch_rms_norm(fused[:, 1:3], weight, 1e-5, dtype=torch.float16)
    assert got.dtype == torch.float16 and got.is_contiguous()
    assert_close("view", got, rms_norm_reference(fused[:, 1:3], weight, 1e-5), 1e-3)
    with pytest.raises(ValueError, match="contiguous"):
        launch_rms_norm(fused[:, 0], weight, 1e-5, fused[:, 1])


def test_cpu_takes_the_reference() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_wrong_epsilon_place_fails() -> None:
    """Control: eps outside the root is another norm, seen where values are small."""
    x, weight = torch.randn(3, 64) * 1e-3, torch.ones(64)
    wrong = x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5)
    with pytest.raises(KernelMismatch):
        assert_close("eps", wrong, rms_norm_reference(x, weight, 1e-5), LIMITS[torch.bfloat16])
