"""Gated activations against float32 torch."""

from __future__ import annotations

import pytest
import torch

from qengine_kernels.gated_activation import KINDS, gated_activation
from qengine_kernels.gated_activation.kernel import launch_gated_activation
from qengine_kernels.gated_activation.reference import gated_activation_reference
from qengine_kernels.testing import KernelMismatch, assert_close, poisoned_empty, readable_id

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1536), (3, 200), (2, 2500), (0, 8)], ids=readable_id)
@pytest.mark.parametrize("kind", KINDS)
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


def test_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"'relu'.*silu"):
        gated_activation(torch.randn(1, 4), "relu")
