"""GPTQ's CUDA linear on words packed from the format's definition, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from covering import covering
from gptq_files import Style, quantize
from qengine.plugin import DeviceInfo, LinearShard, LinearSpec
from qengine_gptq.backend import GptqScheme
from qengine_gptq.kernels import GptqCudaLinear
from qengine_gptq.shards import decode, stack
from qengine_gptq.zeros import ZeroRule
from qengine_kernels.testing import KernelMismatch, assert_close

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CUDA = DeviceInfo("cuda")


def build(
    k: int, outs: Sequence[int], style: Style, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[GptqCudaLinear, torch.Tensor]:
    """The op over fused shards and their dense meaning [N, K]."""
    parts, weights = [], []
    group = k if style.group == -1 else style.group
    for n in outs:
        tensors, meaning = quantize(torch.randn(n, k), style)
        rule = ZeroRule(style.stored, style.symmetric)  # type: ignore[arg-type]
        shard = LinearShard(LinearSpec("m", k, n), tensors)
        part, notes = decode(shard, style.bits, group, rule, style.shuffle is not None, device)
        assert not notes
        parts.append(part)
        weights.append(meaning)
    (whole,) = stack(parts)
    placed = None if bias is None else bias.to(device)
    return GptqCudaLinear(whole, placed, style.symmetric, dtype, CUDA), torch.cat(weights).to(device)


# K, outputs of the shards, group, symmetric, shuffled
Case = tuple[int, tuple[int, ...], int, bool, int | None]
CASES: list[Case] = [
    (256, (64, 40), 64, True, None), (192, (32, 32), 32, False, 3), (96, (64,), 64, True, 4),
    (200, (40,), 32, False, None), (96, (72,), -1, False, None),
]  # fmt: skip


@pytest.mark.parametrize(("bits", "case", "m", "dtype"), covering([2, 3, 4, 8], CASES, [1, 9, 300], [*LIMITS]))
def test_gptq_matches_reference(bits: int, case: Case, m: int, dtype: torch.dtype, device: torch.device) -> None:
    k, outs, group, symmetric, shuffle = case
    bias = torch.randn(sum(outs))
    style = Style(bits, group, symmetric, "gptq_v2", shuffle=shuffle)
    op, dense = build(k, outs, style, bias, dtype, device)
    x = torch.randn(m, k).to(dtype).to(device)
    got, added = op(x), bias.to(dtype).float().to(device)
    assert_close("linear", got, x.float() @ dense.t() + added, LIMITS[dtype])
    with pytest.raises(KernelMismatch):
        assert_close("inputs one off", got, x.float() @ dense.t().roll(1, 0) + added, 0.1)
    planned = GptqScheme(bits, group, ZeroRule("gptq_v2", symmetric), shuffle is not None)
    spec = LinearSpec("m", k, sum(outs), True)
    assert op.nbytes == planned.resident_bytes(spec, DeviceInfo("cuda", capability=(9, 0)), dtype)


def test_without_the_order_act_order_fails(device: torch.device) -> None:
    """Control: the same words with inputs as they come."""
    op, dense = build(128, [64], Style(4, 32, shuffle=1), None, torch.float32, device)
    x = torch.randn(4, 128, device=device)
    assert_close("sorted", op(x), x @ dense.t(), 1e-5)
    op.order = None
    with pytest.raises(KernelMismatch):
        assert_close("unsorted", op(x), x @ dense.t(), 0.1)


def test_gptq_buffers_and_kernel_text(device: torch.device) -> None:
    op, _ = build(128, [64], Style(3, 32, symmetric=False, stored="gptq_v2", shuffle=1), None, torch.float16, device)
    assert list(op.buffers()) == ["words", "meta", "order"]
    assert "W4A16 (3-bit codes held in 4 bits)" in op.kernel and "sorted by group" in op.kernel
    op, _ = build(128, [64], Style(8, 32, scale_dtype=torch.float32), None, torch.float16, device)
    assert list(op.buffers()) == ["words", "scales"] and op.buffers()["scales"].dtype is torch.float16
    assert op.kernel.startswith("Triton W8A16")
