"""Output layers with an 8-bit copy on a CPU: which product runs when, against float32, and the bytes that are kept."""

from __future__ import annotations

import pytest
import torch

from qengine_kernels.cpu_linear import FewRowsCpuLinear, few_rows_bytes, tuning
from qengine_kernels.cpu_linear.few_rows import round_channels
from qengine_kernels.cpu_linear.measure import BATCHES
from qengine_kernels.cpu_linear.reference import linear
from qengine_kernels.testing import relative_error

ROUNDED, EXACT = 1e-2, 4e-3
"""Error ratios of int8 weights per channel (the largest of 100 normal numbers is about 2.5 times a standard deviation,
so a step is 2 % of one and its error a third of that) and of bfloat16's."""


def spread(n: int, k: int) -> torch.Tensor:
    """Channels of very different size: one scale for all would lose most of them."""
    return torch.randn(n, k) * torch.logspace(-3, 1, n)[:, None]


@pytest.mark.parametrize("n, k", [(64, 128), (100, 32), (37, 192), (5000, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_rows_take_the_copy_and_more_the_weight(n: int, k: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = spread(n, k), torch.randn(n) * torch.logspace(-3, 1, n) if with_bias else None
    op = FewRowsCpuLinear(weight, bias, torch.bfloat16, limit=2, preferred="plain")
    codes, scales = round_channels(weight)
    copy = codes.float() * scales.float()[:, None]
    per_tensor = (weight / weight.abs().max() * 127).round() * (weight.abs().max() / 127)
    for m in (1, 2, 3, 9):
        x = torch.randn(m, k).bfloat16()
        y = op(x)
        assert y.dtype is torch.bfloat16 and y.shape == (m, n)
        size = weight.norm(dim=1)  # every channel counts alike
        exact, rounded = linear(x, weight, bias) / size, linear(x, copy, bias) / size
        got = y.float() / size
        assert relative_error(got, rounded if m <= 2 else linear(x, weight.bfloat16(), bias) / size) < EXACT
        assert relative_error(got, exact) < ROUNDED
        assert relative_error(got, linear(x, per_tensor, bias) / size) > 0.1
        assert relative_error(got, linear(x, weight.roll(1, 1), bias) / size) > 0.1


def test_rounding_is_half_a_step_and_keeps_empty_channels() -> None:
    weight = torch.cat([spread(9, 40), torch.zeros(2, 40)])
    codes, scales = round_channels(weight.bfloat16())
    step = scales.float()[:, None]
    error = (codes.float() * step - weight.bfloat16().float()).abs()
    assert (error <= 0.5 * step + weight.abs() / 256).all() and not codes[9:].any() and scales.isfinite().all()
    assert codes.abs().amax(1)[:9].min() >= 126, "the range is used"
    assert (codes.float() * (2 * step) - weight).abs().max() > step.max(), "control: another scale is far off"


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k, limit", [(64, 4), (64, 0), (40, 4)])
def test_bytes_are_known_ahead(k: int, dtype: torch.dtype, limit: int, with_bias: bool) -> None:
    """No copy without a limit, in float32, and for widths that torch's kernel gets wrong."""
    weight, bias = torch.randn(70, k), torch.randn(70) if with_bias else None
    op = FewRowsCpuLinear(weight, bias, dtype, limit=limit, preferred="plain")
    held = sum(t.numel() * t.element_size() for t in op.buffers().values())
    assert held == few_rows_bytes(70, k, with_bias, dtype, limit=limit, preferred="plain")
    copied = dtype is torch.bfloat16 and limit > 0 and k == 64
    assert ("int8 copy per channel for up to 4 rows on CPU" in op.kernel) == copied == ("codes" in op.buffers())
    x = torch.randn(1, k).to(dtype)
    assert relative_error(op(x), linear(x, weight, bias)) < (1e-6 if dtype is torch.float32 else ROUNDED)


def test_the_limit_is_measured() -> None:
    assert tuning().int8_limit in (0, *BATCHES)
