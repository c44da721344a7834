"""AWQ's CUDA linear on words packed here from the format's definition (FORMATS: AutoAWQ gemm layout)."""

from __future__ import annotations

import pytest
import torch

from awq_files import write_linear
from covering import covering
from qengine.plugin import DeviceInfo, LinearSpec
from qengine_awq.kernels import AwqCudaLinear
from qengine_awq.layouts import LAYOUTS
from qengine_kernels.launch import Chip
from qengine_kernels.testing import KernelMismatch, assert_close
from qengine_kernels.wna16_gemm import held_bytes, packed_bytes

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def pack_by_definition(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[R, N] -> int32 [R, N / 8]: nibble s of word w is column 8 * w + order[s]."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate(order):
        words |= codes[:, column::8].long() << (4 * nibble)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def build(
    k: int, n: int, group_size: int, zeros: bool, dtype: torch.dtype, device: torch.device, order: tuple[int, ...]
) -> tuple[AwqCudaLinear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    group = k if group_size == -1 else group_size
    groups = -(-k // group)
    codes, zero = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (groups, n))
    scales, bias = (torch.rand(groups, n) * 0.05 + 0.01).half(), torch.randn(n)
    row = torch.arange(k) // group
    dense = (codes - (zero[row] if zeros else 8)).float() * scales.float()[row]
    op = AwqCudaLinear(
        pack_by_definition(codes, order).to(device),
        pack_by_definition(zero, order).to(device) if zeros else None,
        scales.to(device),
        bias.to(device),
        group_size,
        dtype,
        DeviceInfo(device.type),  # type: ignore[arg-type]
    )
    return op, dense.to(device), bias.to(device)


def test_the_documented_word(device: torch.device) -> None:
    """CASES C02: row 0 holds codes 0..7 in columns 0..7 and its word is 0x75316420."""
    word = pack_by_definition(torch.arange(8)[None], AWQ_ORDER)
    assert word.item() == 0x75316420
    qweight = torch.zeros(64, 1, dtype=torch.int32)
    qweight[0] = word
    op = AwqCudaLinear(
        qweight.to(device), torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.ones(1, 8, dtype=torch.float16, device=device), None, 64, torch.float32, DeviceInfo("cuda"),
    )  # fmt: skip
    one_hot = torch.eye(64, device=device)[:1]
    assert op(one_hot).cpu().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


# K, N, group size, zeros
SHAPES = [(256, 64, 64, True), (96, 72, -1, True), (200, 40, 32, False)]


@pytest.mark.parametrize(("shape", "m", "dtype"), covering(SHAPES, [1, 9, 300], [*LIMITS]))
def test_matches_reference(
    shape: tuple[int, int, int, bool], m: int, dtype: torch.dtype, device: torch.device
) -> None:
    op, dense, bias = build(*shape, dtype, device, AWQ_ORDER)
    x = torch.randn(m, shape[0]).to(dtype).to(device)
    assert_close("linear", op(x), x.float() @ dense + bias.to(dtype).float(), LIMITS[dtype])


def test_gptq_order_fails(device: torch.device) -> None:
    """Control: nibbles in plain order are other columns."""
    op, dense, bias = build(64, 32, 64, True, torch.float32, device, tuple(range(8)))
    x = torch.randn(2, 64, device=device)
    with pytest.raises(KernelMismatch):
        assert_close("order", op(x), x @ dense + bias, 1e-2)


@pytest.mark.parametrize("zeros", [True, False])
def test_buffers_are_named_and_counted(zeros: bool, device: torch.device) -> None:
    op, _, _ = build(200, 64, 32, zeros, torch.float16, device, AWQ_ORDER)
    assert list(op.buffers()) == ["words", "scales", *(["zeros"] if zeros else []), "bias"]
    assert op.nbytes == packed_bytes(200, 64, 32, zeros) + 64 * 2
    op, _, _ = build(256, 64, 32, zeros, torch.float16, device, AWQ_ORDER)
    assert list(op.buffers()) == ["words", "meta", "bias"]
    assert op.nbytes == held_bytes(256, 64, 32, zeros, torch.float16, Chip.of(device)) + 64 * 2


def test_chip_and_shapes(device: torch.device) -> None:
    words = torch.zeros(64, 1, dtype=torch.int32, device=device)
    scales = torch.ones(2, 8, device=device)
    op = AwqCudaLinear(words, None, scales, None, 32, torch.float16, DeviceInfo("cuda", capability=(7, 5)))
    assert "sm_75" in op.kernel and op.buffers()["scales"].dtype == torch.float16
    with pytest.raises(ValueError, match=r"\(2, 8\); need \(1, 8\)"):
        AwqCudaLinear(words, None, scales, None, -1, torch.float16, DeviceInfo("cuda"))


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "llm-awq", "marlin"])
def test_every_layout_becomes_words_of_this_one(version: str, device: torch.device) -> None:
    torch.manual_seed(3)
    spec = LinearSpec("m", 256, 64)
    tensors, meaning = write_linear(torch.randn(64, 256) * 0.05, version, 128)
    layout = next(layout for layout in LAYOUTS if layout.name == version)
    own = layout.to_gemm(spec, {leaf: t.to(device) for leaf, t in tensors.items()}, 128)
    op = AwqCudaLinear(
        own["qweight"], own.get("qzeros"), own["scales"], None, 128, torch.float16, DeviceInfo(device.type)
    )
    x = torch.randn(5, 256, device=device).half()
    assert_close("linear", op(x), x.float() @ meaning.t().to(device), LIMITS[torch.float16])
    with pytest.raises(KernelMismatch):
        assert_close("columns", op(x), x.float() @ meaning.t().flip(1).to(device), 1e-2)
