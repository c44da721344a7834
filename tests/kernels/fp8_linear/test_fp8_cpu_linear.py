"""e4m3 linears on a CPU: exact in float32, close in bfloat16, one byte a weight."""

from __future__ import annotations

import pytest
import torch

import qengine_kernels.fp8_linear.cpu as cpu
from fp8_files import Packed, pack_block, pack_channel, pack_tensor
from qengine_kernels.fp8_linear import (
    Fp8CpuLinear,
    Fp8Shard,
    fp8_bytes,
    holds_nan,
    native_reason,
    quantize_weight,
    stack_shards,
)
from qengine_kernels.testing import readable_id, relative_error

CPU = torch.device("cpu")
BLOCK = (128, 128)


def shard(packed: Packed) -> Fp8Shard:
    tensors, _ = packed
    (scale,) = [t for leaf, t in tensors.items() if leaf != "weight"]
    return Fp8Shard(tensors["weight"], scale)


def fused(kind: str, k: int) -> tuple[list[Fp8Shard], torch.Tensor, tuple[int, int] | None]:
    """Three modules whose weights differ by powers of ten, as they are stored, and what they mean."""
    torch.manual_seed(0)
    weights = [torch.randn(n, k) * f for n, f in ((192, 1.0), (64, 10.0), (64, 0.01))]
    pack = {"tensor": pack_tensor, "channel": pack_channel, "block": pack_block}[kind]
    packed = [pack(w) for w in weights]
    return [shard(p) for p in packed], torch.cat([p[1] for p in packed]), BLOCK if kind == "block" else None


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("k", [256, 320, 77])
@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=readable_id)
def test_each_shard_keeps_its_scale(
    kind: str, k: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "TILE", 50 * k)  # tiles that end nowhere in particular
    shards, dense, block = fused(kind, k)
    bias, x = torch.randn(320), torch.randn(m, k).to(dtype)
    want = x.float() @ dense.t()
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    got = Fp8CpuLinear(stack_shards(shards, block, CPU), None, dtype, "plain")(x)
    assert got.dtype is dtype
    for part in (slice(0, 192), slice(192, 256), slice(256, 320)):
        assert relative_error(got[:, part], want[:, part]) < limit, part
    biased = Fp8CpuLinear(stack_shards(shards, block, CPU), bias, dtype, "plain")(x)
    assert relative_error(biased, want + bias) < limit


def test_float32_way_and_bytes() -> None:
    shards, dense, block = fused("block", 256)
    weight = stack_shards(shards, block, CPU)
    exact, rounded = (Fp8CpuLinear(weight, None, torch.bfloat16, way) for way in ("float32", "packed"))
    x = torch.randn(20, 256).bfloat16()
    want = x.float() @ dense.t()
    assert relative_error(exact(x), want) < relative_error(rounded(x), want) < 8e-3
    assert "float32 GEMM" in exact.kernel and "bfloat16 GEMM" in rounded.kernel
    held = sum(t.numel() * t.element_size() for t in exact.buffers().values())
    assert abs(held - fp8_bytes(320, 256, block, False, torch.bfloat16)) <= 16
    assert held < 1.05 * dense.numel()


def test_a_single_shard_is_not_copied() -> None:
    shards, _, _ = fused("tensor", 256)
    weight = stack_shards(shards[:1], None, CPU)
    assert weight.codes.data_ptr() == shards[0].codes.data_ptr()


def test_merged_scales_lose_the_small_shard() -> None:
    """Control: what requantising every shard to the largest scale does to one of a hundredth of its size."""
    shards, dense, _ = fused("tensor", 256)
    largest = max(s.scale for s in shards)
    merged = [
        Fp8Shard((s.codes.float() * s.scale / largest).to(torch.float8_e4m3fn), largest) for s in shards
    ]
    x = torch.randn(4, 256)
    want = (x @ dense.t())[:, 256:]
    right, wrong = (Fp8CpuLinear(stack_shards(s, None, CPU), None, torch.float32, "plain") for s in (shards, merged))
    assert relative_error(right(x)[:, 256:], want) < 1e-6
    assert relative_error(wrong(x)[:, 256:], want) > 0.01


def test_dense_weights_become_fp8_by_row() -> None:
    weight = torch.randn(300, 64) * torch.logspace(-4, 3, 300)[:, None]
    weight[7] = 0
    made = quantize_weight(weight.bfloat16(), CPU)
    back = made.codes.view(torch.float8_e4m3fn).float() * made.scale
    for row in (0, 150, 299):
        assert relative_error(back[row], weight[row]) < 0.04
    assert torch.equal(back[7], torch.zeros(64)) and (made.scale > 0).all()
    torch.testing.assert_close(back.abs().amax(1), weight.bfloat16().float().abs().amax(1), rtol=1e-6, atol=1e-12)
    for bad in (float("nan"), float("inf")):
        broken = weight.clone()
        broken[3, 3] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize_weight(broken, CPU)


def test_conversion_holds_little_beside_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    import qengine_kernels.fp8_linear.weight as module

    widest = 0
    encode = module.encode

    def watched(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, x.numel() * x.element_size())
        return encode(x, dtype)

    monkeypatch.setattr(module, "encode", watched)
    monkeypatch.setattr(module, "CHUNK_BYTES", 64 * 1024)
    weight = torch.randn(1000, 256).bfloat16()
    made = quantize_weight(weight, CPU)
    assert widest <= 64 * 1024
    assert torch.equal(made.codes, module.encode((weight.float() / made.scale), torch.float8_e4m3fn))


def test_nan_codes_are_found() -> None:
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    codes[0] = 0x7E
    assert not holds_nan(codes.view(torch.float8_e4m3fn))
    for code in (0x7F, 0xFF):
        codes[3, 7] = code
        assert holds_nan(codes.view(torch.float8_e4m3fn))


def test_where_native_is_possible() -> None:
    assert native_reason(89, torch.bfloat16) is None and native_reason(90, torch.float16) is None
    assert "sm_89" in str(native_reason(86, torch.float16))
    assert "float32" in str(native_reason(90, torch.float32))
    assert "CPU" in str(native_reason(0, torch.bfloat16))
