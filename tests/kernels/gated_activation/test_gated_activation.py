"""Gated activations against float32 torch."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from qengine_kernels.gated_activation import KINDS, gated_activation, scaled_activation
from qengine_kernels.gated_activation.kernel import launch_gated_activation, launch_scaled_activation
from qengine_kernels.gated_activation.reference import gated_activation_reference, scaled_activation_reference
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty

LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SHAPES = [(1, 1), (5, 1536), (3, 200), (2, 2500), (0, 8)]


@pytest.mark.parametrize(("kind", "shape", "dtype"), covering([*KINDS], SHAPES, [*LIMITS]))
def test_matches_reference(kind: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 6).to(dtype).to(device)
    with poisoned_empty():
        got = launch_gated_activation(x, kind)
    assert got.dtype == dtype
    assert_close(kind, got, gated_activation_reference(x.float(), kind), LIMITS[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter; the result is right
@pytest.mark.parametrize("kind", KINDS)
def test_ends_stay_finite(kind: str, device: torch.device) -> None:
    x = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    got = launch_gated_activation(x, kind)
    assert torch.allclose(got.cpu(), torch.tensor([[0.0, 0.0, 0.0, 50.0, 1e4]]), atol=1e-6)


def test_strided_rows(device: torch.device) -> None:
    wide = torch.randn(4, 3, 64, device=device)
    got = launch_gated_activation(wide[:, 1], "silu")
    assert_close("rows", got, gated_activation_reference(wide[:, 1], "silu"), 1e-6)


def test_kinds_and_halves_are_told_apart() -> None:
    """Control: swapped halves and the other gelu are further away than any limit above allows float32 to be."""
    x = torch.randn(4, 64)
    swapped = torch.cat([x[:, 32:], x[:, :32]], dim=1)
    with pytest.raises(KernelMismatch):
        assert_close("halves", gated_activation(swapped, "silu"), gated_activation(x, "silu"), 6e-3)
    with pytest.raises(KernelMismatch):
        assert_close("gelu", gated_activation(x, "gelu"), gated_activation(x, "gelu_tanh"), LIMITS[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("kind", "shape", "dtype"), covering([*KINDS], SHAPES, [torch.float32, torch.float16])
)
def test_scaled_rows_keep_within_the_limit(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of ordinary size, and rows whose product leaves float16 by far."""
    x = torch.randn(shape[0], 2 * shape[1]) * 6
    x[::2] *= 300
    x = x.to(dtype).to(device)
    with poisoned_empty():
        got, scale = launch_scaled_activation(x, kind, 64.0)
    want, scale_of = scaled_activation_reference(x, kind, 64.0)
    assert got.dtype == dtype and scale.shape == (shape[0], 1)
    assert torch.equal(scale.cpu(), scale_of.cpu())
    assert got.numel() == 0 or float(got.abs().max()) <= 64.0
    assert_close("rows", got, want, LIMITS[dtype])
    whole = gated_activation_reference(x.float(), kind)
    assert_close("times their scale", got.float() * scale, whole, LIMITS[dtype])


def test_scales_are_powers_of_two_and_no_larger_than_needed(device: torch.device) -> None:
    products = torch.tensor([0.0, 1.0, 64.0, 64.5, 128.0, 129.0, 1e9])
    x = torch.stack((torch.full_like(products, 20.0), products / 20), dim=1).to(device)  # silu(20) is 20
    _, scale = launch_scaled_activation(x, "silu", 64.0)
    assert scale.flatten().tolist()[:6] == [1.0, 1.0, 1.0, 2.0, 2.0, 4.0]
    assert 2**23 < float(scale[6]) <= 2**24


def test_naive_float16_is_lost_where_scaled_rows_are_not() -> None:
    """Control: without the scale the same rows are infinite."""
    x = torch.tensor([[256.0, 256.0]], dtype=torch.float16)
    assert torch.isinf(gated_activation(x, "silu")).all()
    y, scale = scaled_activation(x, "silu", 64.0)
    assert float(y.float() * scale) == 65536.0


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_a_row_that_is_not_finite_stays_so(device: torch.device) -> None:
    x = torch.ones(3, 8, device=device)
    x[1, 2] = float("nan")
    x[2, 5] = float("inf")
    y, scale = launch_scaled_activation(x, "silu", 64.0)
    finite = torch.isfinite(y.float() * scale).all(-1)
    assert finite.tolist() == [True, False, False]


def test_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"'relu'.*silu"):
        gated_activation(torch.randn(1, 4), "relu")
