"""The CPU linears against float32: every way, every dtype, both sides of the switch, exact bytes."""

import itertools

import pytest
import torch

from qengine_kernels import cpu_linear
from qengine_kernels.cpu_linear import (
    DenseCpuLinear,
    Int4CpuLinear,
    Int8CpuLinear,
    Way,
    dense_bytes,
    int4_bytes,
    int4_group,
    int8_bytes,
    measure,
    reference,
)
from qengine_kernels.cpu_linear.dense import packed_available
from qengine_kernels.cpu_linear.reference import dequantize, linear
from qengine_kernels.testing import relative_error

WAYS: list[Way] = ["plain", "float32"] + (["packed"] if packed_available() else [])
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 1e-6}
SHAPES = [(64, 128, 64), (24, 96, 64), (40, 200, 32), (72, 128, -1), (64, 48, 16), (16, 512, 256), (80, 96, 32)]


def quantised(n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = 1 if group == -1 else -(-k // group)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = torch.rand(n, groups) * 0.02 + 0.005
    zeros = torch.randint(0, 16, (n, groups)).float()
    return codes, scales, zeros, torch.randn(n)


def held(op: DenseCpuLinear | Int4CpuLinear | Int8CpuLinear) -> int:
    return sum(t.numel() * t.element_size() for t in op.buffers().values())


@pytest.mark.parametrize("n, k, group", [*SHAPES, (5, 20, 32), (7, 50, 16)])
@pytest.mark.parametrize("at_once", [1, 300, reference.AT_ONCE])
def test_dequantised_in_parts_it_is_the_plain_formula(
    n: int, k: int, group: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scales, zeros, _ = quantised(n, k, group)
    of = torch.arange(k) // (k if group == -1 else group)
    plain = (codes.float() - zeros[:, of]) * scales[:, of]
    monkeypatch.setattr(reference, "AT_ONCE", at_once)
    for dtype in LIMIT:
        assert torch.equal(dequantize(codes, scales, zeros, group, dtype), plain.to(dtype))
        assert not torch.equal(dequantize(codes, scales, zeros.flip(0), group, dtype), plain.to(dtype))


@pytest.mark.parametrize("n, k, group", SHAPES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_int4(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    codes, scales, zeros, bias = quantised(n, k, group)
    weight = dequantize(codes, scales, zeros, group)
    wrong = dequantize(codes, scales, zeros + 1, group)
    for keep, way in itertools.product((True, False), WAYS):
        op = Int4CpuLinear(codes, scales, zeros, group, bias, dtype, limit=4, preferred=way, keep_dense=keep)
        assert held(op) == int4_bytes(n, k, group, True, dtype, limit=4, preferred=way, keep_dense=keep)
        for m in (1, 4, 5, 33):
            x = (torch.randn(m, k) + 1).to(dtype)  # a mean, so that a shifted zero cannot cancel out
            y = op(x)
            assert y.dtype is dtype
            assert relative_error(y, linear(x, weight, bias)) < LIMIT[dtype], (keep, way, m, op.kernel)
            assert relative_error(y, linear(x, wrong, bias)) > 0.02


@pytest.mark.parametrize("n, k, group", SHAPES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_int8(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    codes, scales, zeros, bias = quantised(n, k, group)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    zeros = zeros * 8 + 64
    weight, wrong = (dequantize(codes, scales, z, group) for z in (zeros, zeros + 16))
    for keep, way in itertools.product((True, False), WAYS):
        op = Int8CpuLinear(codes, scales, zeros, group, bias, dtype, preferred=way, keep_dense=keep)
        assert held(op) == int8_bytes(n, k, group, True, dtype, preferred=way, keep_dense=keep)
        halves = not keep and dtype is torch.bfloat16 and int4_group(k, group) is not None
        assert bool(op.halves) == halves and ("two int4 halves" in op.kernel) == halves
        for m in (1, 33):
            x = (torch.randn(m, k) + 1).to(dtype)
            y = op(x)
            assert y.dtype is dtype
            assert relative_error(y, linear(x, weight, bias)) < LIMIT[dtype], (keep, way, m, op.kernel)
            assert relative_error(y, linear(x, wrong, bias)) > 0.02


def test_int8_halves_take_half_of_16_bit() -> None:
    sizes = [int8_bytes(512, 512, 128, False, torch.bfloat16, preferred="plain", keep_dense=k) for k in (False, True)]
    assert sizes[0] < 1.1 * 512 * 512 < 2 * 512 * 512 == sizes[1]


def test_both_sides_of_the_switch_agree() -> None:
    """int4 and the dense copy see the same weights, so a row means the same in a batch of 4 and of 5."""
    codes, scales, zeros, _ = quantised(64, 128, 64)
    op = Int4CpuLinear(codes, scales, zeros, 64, None, torch.bfloat16, limit=4, preferred=WAYS[-1])
    x = torch.randn(5, 128).bfloat16()
    assert op.dense is not None
    assert relative_error(op(x[:4]), op(x)[:4]) < 6e-3
    assert torch.equal(op(x), op.dense(x)) and not torch.equal(op(x[:4]), op.dense(x[:4]))


def test_rows_are_independent() -> None:
    """A NaN row stays alone on both sides of the switch."""
    codes, scales, zeros, _ = quantised(64, 128, 64)
    for way, m in itertools.product(WAYS, (3, 20)):
        op = Int4CpuLinear(codes, scales, zeros, 64, None, torch.bfloat16, limit=4, preferred=way)
        x = torch.randn(m, 128).bfloat16()
        clean = op(x)
        x[1] = float("nan")
        y = op(x)
        assert not torch.isfinite(y[1]).any()
        assert torch.equal(y[0], clean[0]) and torch.equal(y[2:], clean[2:])


def test_kernel_group() -> None:
    assert int4_group(576, 64) == 64 and int4_group(1536, 128) == 128
    assert int4_group(96, 64) == 32, "a short last group: 32 divides both"
    assert int4_group(576, -1) == 64 and int4_group(4096, -1) == 256
    assert int4_group(4096, 512) == 256
    assert int4_group(200, 32) is None and int4_group(64, 16) is None


def test_kernel_says_what_runs() -> None:
    codes, scales, zeros, _ = quantised(16, 64, 32)

    def kernel(dtype: torch.dtype, **options: object) -> str:
        args = {"limit": 3, "preferred": "plain"} | options
        return Int4CpuLinear(codes, scales, zeros, 32, None, dtype, **args).kernel

    assert kernel(torch.bfloat16) == "int4 up to M=3, bfloat16 GEMM above (measured)"
    assert "no dense copy" in kernel(torch.bfloat16, keep_dense=False)
    assert "faster than int4" in kernel(torch.bfloat16, limit=0)
    assert "float32 GEMM" in kernel(torch.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n, k", [(64, 128), (24, 64), (100, 33), (128, 192)])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_dense(way: Way, n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(n, k), torch.randn(n)
    for b in (None, bias):
        op = DenseCpuLinear(weight, b, dtype, way)
        assert held(op) == dense_bytes(n, k, b is not None, dtype, way)
        for m in (1, 19):
            x = torch.randn(m, k).to(dtype)
            y = op(x)
            assert y.dtype is dtype and y.shape == (m, n)
            assert relative_error(y, linear(x, weight, b)) < LIMIT[dtype]
    assert relative_error(op(x), linear(x, weight)) > 0.02


def test_float32_is_exact() -> None:
    """--dtype float32 means float32: no packed or 16-bit weight anywhere."""
    weight = torch.randn(64, 64)
    op = DenseCpuLinear(weight, None, torch.float32, "packed")
    assert torch.equal(op.buffers()["weight"], weight)


def test_tuning_measures_once_and_restores_threads() -> None:
    before = torch.get_num_threads()
    t = cpu_linear.tuning()
    assert torch.get_num_threads() == before
    assert t is cpu_linear.tuning()
    assert t.dense in WAYS and t.int4_limit in (0, *measure.BATCHES)
