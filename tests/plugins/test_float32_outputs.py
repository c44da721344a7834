"""Logits are not rounded to 16 bits where an op can help it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qengine.plugin import LinearOp
from qengine_dense.backend import DenseCudaOp


class Doubling(LinearOp):
    """Computes in the compute dtype, as every op may."""

    in_features = out_features = 8
    kernel = "none"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    def buffers(self) -> dict[str, torch.Tensor]:
        return {}


def test_an_op_that_says_nothing_gives_its_own_result_in_float32() -> None:
    x = torch.randn(3, 8).bfloat16()
    out = Doubling().float32(x)
    assert out.dtype is torch.float32 and torch.equal(out, (x * 2).float())


def error(op: DenseCudaOp, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[float, float]:
    """Root mean square of (float32 output, rounded output) against float64, over that of the output."""
    exact = F.linear(x.double(), op.weight.double(), None if bias is None else bias.double())
    return tuple(float((y.double() - exact).norm() / exact.norm()) for y in (op.float32(x), op(x)))  # type: ignore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_gpu_the_result_is_the_rounded_one(dtype: torch.dtype) -> None:
    op = DenseCudaOp(torch.randn(50, 64).to(dtype), None)
    x = torch.randn(5, 64).to(dtype)
    assert op.float32(x).dtype is torch.float32
    torch.testing.assert_close(op.float32(x), op(x).float(), rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_a_gpu_gives_float32_sums(rows: int, dtype: torch.dtype, with_bias: bool) -> None:
    gen = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(5000, 512, device="cuda", generator=gen).to(dtype)
    bias = torch.randn(5000, device="cuda", generator=gen).to(dtype) if with_bias else None
    x = torch.randn(rows, 512, device="cuda", generator=gen).to(dtype)
    kept, rounded = error(DenseCudaOp(weight, bias), x, bias)
    assert kept < 1e-5
    assert rounded > 1e-4, "the control: rounding to 16 bits would be seen"
