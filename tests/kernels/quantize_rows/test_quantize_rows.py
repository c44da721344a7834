"""Activation quantisation against plain torch: same codes, same scales."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from fp8_files import TABLE, encode_e4m3
from qengine_kernels.fp8.device import e4m3_encode
from qengine_kernels.quantize_rows import quantize_rows
from qengine_kernels.quantize_rows.reference import quantize_rows_reference
from qengine_kernels.testing import poisoned_empty, relative_error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("kind", "k", "dtype"), covering(["token", "block", "static"], [16, 77, 320, 5000], DTYPES)
)
def test_matches_reference(kind: str, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(5, k) * torch.tensor([[1e-3], [1], [100], [0], [7]])).to(dtype)
    scale = torch.tensor([0.05]) if kind == "static" else None
    block = 128 if kind == "block" else None
    with poisoned_empty():
        codes, scales = quantize_rows(
            x.to(device), e4m3_encode, 448.0, block=block, scale=None if scale is None else scale.to(device)
        )
    want_codes, want_scales = quantize_rows_reference(x, encode_e4m3, 448.0, block=block, scale=scale)
    assert torch.equal(scales.cpu(), want_scales)
    assert torch.equal(codes.cpu() & 0x7F, want_codes & 0x7F)
    assert scales.shape == (5, -(-k // 128) if kind == "block" else 1)


def test_dynamic_scales_keep_every_row_and_static_ones_saturate(device: torch.device) -> None:
    x = torch.randn(4, 64) * torch.tensor([[1e-4], [1.0], [100.0], [1e4]])
    codes, scales = quantize_rows(x.to(device), e4m3_encode, 448.0)
    back = TABLE[codes.cpu().long()] * scales.cpu()
    assert all(relative_error(a, b) < 0.04 for a, b in zip(back, x, strict=True))
    codes, scales = quantize_rows(x.to(device), e4m3_encode, 448.0, scale=torch.tensor([0.01], device=device))
    back = TABLE[codes.cpu().long()] * scales.cpu()
    assert back.abs().max() == pytest.approx(4.48)
    assert relative_error(back[1], x[1]) < 0.04 and relative_error(back[3], x[3]) > 0.9
    # power: a block's scale is its own, one for the row would lose small blocks
    x = torch.cat([torch.randn(1, 128) * 1e-5, torch.randn(1, 128)], 1)
    for block, kept in ((128, True), (None, False)):
        codes, scales = quantize_rows(x.to(device), e4m3_encode, 448.0, block=block)
        small = TABLE[codes.cpu().long()][:, :128] * scales.cpu()[:, :1]
        assert (relative_error(small, x[:, :128]) < 0.04) is kept


def test_rows_that_are_not_finite_stay_alone(device: torch.device) -> None:
    x = torch.ones(3, 32)
    x[1, 5] = float("nan")
    codes, scales = quantize_rows(x.to(device), e4m3_encode, 448.0)
    values = TABLE[codes.cpu().long()] * scales.cpu()
    assert torch.isnan(values[1, 5]) and torch.equal(values[[0, 2]], torch.ones(2, 32))


def test_views_and_no_rows(device: torch.device) -> None:
    x = torch.randn(64, 6, device=device).t()
    codes, _ = quantize_rows(x, e4m3_encode, 448.0)
    assert torch.equal(codes, quantize_rows(x.contiguous(), e4m3_encode, 448.0)[0])
    wide = torch.randn(6, 128, device=device)
    part, copy = (quantize_rows(x, e4m3_encode, 448.0)[0] for x in (wide[:, :64], wide[:, :64].contiguous()))
    assert torch.equal(part, copy)
    codes, scales = quantize_rows(wide[:0], e4m3_encode, 448.0, block=64)
    assert codes.shape == (0, 128) and scales.shape == (0, 2)
