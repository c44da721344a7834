"""compressed-tensors' CUDA linears over weights that an independent writer made, beside float32 with their meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compressed_tensors_files import (
    FP8_DYNAMIC,
    INT8_DYNAMIC,
    fp8_tensors,
    fp8_weights,
    group_of,
    headers,
    int_tensors,
    quant_config,
    spec_of,
    weights,
)
from qengine.plugin import DeviceInfo, LinearScheme, LinearShard
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_compressed_tensors.int8 import LARGEST, Int8CpuOp, quantize_rows
from qengine_compressed_tensors.integers import IntFormat
from qengine_compressed_tensors.kernels import Int8CudaLinear, IntCudaLinear, held_bits, int8_encode
from qengine_kernels.quantize_rows import quantize_rows as quantize_on_device
from qengine_kernels.testing import assert_close, poisoned_empty, readable_id, relative_error

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def stored(bits: int, group: int, symmetric: bool, reordered: bool) -> IntFormat:
    return IntFormat(bits, group, None, "dense", None if symmetric else "dense", reordered)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=readable_id)
@pytest.mark.parametrize(
    "bits, group, symmetric, reordered",
    [(2, 32, True, False), (3, 64, False, False), (4, 128, True, True), (4, -1, False, False), (5, 32, False, True),
     (8, 64, True, False), (8, -1, False, False)],
)  # fmt: skip
def test_weight_only(
    bits: int, group: int, symmetric: bool, reordered: bool, dtype: torch.dtype, device: torch.device
) -> None:
    n, k = 40, 256
    g_idx = (torch.arange(k) // group)[torch.randperm(k)] if reordered else None
    size = torch.ones(k) if g_idx is None else torch.logspace(-2, -1, k // group)[g_idx]
    tensors, meaning = int_tensors(torch.randn(n, k) * size, bits, group, symmetric=symmetric, g_idx=g_idx)
    form, bias = stored(bits, group, symmetric, reordered), torch.randn(n).to(dtype)
    spec = spec_of("m", meaning, True)
    codes = form.decode(spec, tensors, device)
    op = IntCudaLinear(codes, bits, form.middle, group, bias.to(device), dtype, DeviceInfo("cuda"))
    assert (f"held in {held_bits(bits)} bits" in op.kernel) == (bits not in (2, 4, 8))
    for m in (1, 5):
        x = torch.randn(m, k).to(dtype)
        with poisoned_empty():
            got = op(x.to(device)).cpu()
        want = x.float() @ meaning.t() + bias.float()
        assert_close(f"{bits} bits m={m}", got.float(), want, LIMITS[dtype])
        assert relative_error(got, x.float() @ meaning.roll(1, 0).t() + bias.float()) > 0.1
        if reordered:
            straight = IntCudaLinear(
                form.decode(spec, tensors | {"weight_g_idx": torch.full((k,), -1)}, device),
                bits, form.middle, group, bias.to(device), dtype, DeviceInfo("cuda"),
            )  # fmt: skip
            assert relative_error(straight(x.to(device)).cpu(), want) > 0.1, "control: inputs not reordered"


def test_int8_codes_of_activations(device: torch.device) -> None:
    """The device function rounds to nearest even and saturates, as the CPU's."""
    odd = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, -128.5, 1e6, -1e6])
    x = torch.cat([torch.linspace(-130, 130, 1041), odd])
    one = torch.ones(1, device=device)
    codes, _ = quantize_on_device(x[None].to(device), int8_encode, LARGEST, scale=one)
    want = x.round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(codes.cpu().view(torch.int8)[0], want)
    assert not torch.equal(want, (x + 0.5).floor().clamp(-128, 127).to(torch.int8)), "control: halves go up"
    rows = torch.randn(3, 100)
    codes, scales = quantize_on_device(rows.to(device), int8_encode, LARGEST)
    want_codes, want_scales = quantize_rows(rows, None)
    torch.testing.assert_close(scales.cpu(), want_scales, rtol=1e-6, atol=0)
    off = (codes.cpu().view(torch.int8).int() - want_codes.int()).abs()
    assert off.max() <= 1 and off.float().mean() < 0.01


@pytest.mark.parametrize("n, k", [(40, 96), (33, 100)])
@pytest.mark.parametrize("x_scale", [None, 0.02])
@pytest.mark.parametrize("native", [True, False])
def test_int8_activations(n: int, k: int, x_scale: float | None, native: bool, device: torch.device) -> None:
    """Equal to the CPU's op on the same rounded activations, on the Triton and the library's route, with and without
    int8 units; products are exact, so float32 results differ by rounding alone."""
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales, bias = torch.rand(n) * 0.01, torch.randn(n)
    sm = (9, 0) if native else (7, 5)
    op = Int8CudaLinear(
        codes.to(device), scales.to(device), bias.to(device), x_scale, torch.float32, DeviceInfo("cuda", "", sm)
    )
    assert op.native == native and op.library == (n % 8 == 0 and k % 8 == 0)
    reference = Int8CpuOp(codes, scales, bias, x_scale, torch.float32)
    for m in (1, 17, 70):
        x = torch.randn(m, k)
        with poisoned_empty():
            got = op(x.to(device)).cpu()
        assert_close(f"m={m}", got, reference(x), 2e-4)
        exact = torch.nn.functional.linear(x, codes.float() * scales[:, None], bias)
        assert 1e-3 < relative_error(got, exact) < 0.05, "control: activations are rounded, and not by much"
    named = {"codes", "scales", "bias"} | ({"x_scale"} if x_scale else set())
    assert set(op.buffers()) == named


def test_largest_products_are_exact(device: torch.device) -> None:
    """Every product at its largest: sums of a block must not saturate or lose bits."""
    k = 512
    codes = torch.full((8, k), -128, dtype=torch.int8)
    for sm in ((9, 0), (7, 5)):
        info = DeviceInfo("cuda", "", sm)
        op = Int8CudaLinear(codes.to(device), torch.ones(8).to(device), None, 1.0, torch.float32, info)
        got = op(torch.full((2, k), -128.0).to(device)).cpu()
        assert (got == 128.0 * 128 * k).all()


def built(config: dict[str, Any], parts: list[Any]) -> tuple[LinearScheme, list[LinearShard], torch.Tensor]:
    quant = CompressedTensorsQuant.parse(config)
    shards = [LinearShard(spec_of(f"m{i}", w), dict(t)) for i, (t, w) in enumerate(parts)]
    schemes = [quant.scheme_for(s.spec, headers(s.spec.name, s.tensors)) for s in shards]
    assert schemes[0] is not None
    return schemes[0], shards, torch.cat([w for _, w in parts])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=readable_id)
@pytest.mark.parametrize(
    "config, make, limit",
    [
        (quant_config(group_of(weights(4, "group", 128))), lambda w: int_tensors(w, 4, 128), 1e-2),
        (
            quant_config(group_of(weights(3, "group", 64, symmetric=False)), version="0.12.2"),
            lambda w: int_tensors(w, 3, 64, symmetric=False, layout="padded"),
            1e-2,
        ),
        (quant_config(group_of(weights(8, "channel"))), lambda w: int_tensors(w, 8, -1), 1e-2),
        (
            quant_config(group_of(weights(8, "channel"), inputs=INT8_DYNAMIC), form="int-quantized"),
            lambda w: int_tensors(w, 8, -1, layout="bytes"),
            3e-2,
        ),
        (
            quant_config(group_of(fp8_weights("channel"), inputs=FP8_DYNAMIC), form="float-quantized"),
            lambda w: fp8_tensors(w, "channel"),
            6e-2,
        ),
        (
            quant_config(group_of(fp8_weights("tensor")), form="naive-quantized"),
            lambda w: fp8_tensors(w, "tensor"),
            1e-2,
        ),
        (
            quant_config(
                group_of(
                    fp8_weights("block", [128, 128]), inputs=FP8_DYNAMIC | {"strategy": "group", "group_size": 128}
                ),
                form="float-quantized",
            ),
            lambda w: fp8_tensors(w, "block"),
            6e-2,
        ),
    ],
    ids=["w4-g128", "w3-asym-padded", "w8-channel", "w8a8-int8", "fp8-channel", "fp8-weight-only", "fp8-block"],
)
def test_bound_on_a_gpu(config: dict[str, Any], make: Any, limit: float, dtype: torch.dtype) -> None:
    """Fused shards, bytes as planned, rounded activations within their own error."""
    torch.manual_seed(0)
    p = torch.cuda.get_device_properties(0)
    info = DeviceInfo("cuda", p.name, (p.major, p.minor), p.shared_memory_per_block_optin, p.total_memory)
    scheme, shards, weight = built(config, [make(torch.randn(n, 512) * 0.05) for n in (256, 64, 64)])
    assert scheme.capability(info, dtype)
    op = scheme.bind(shards, torch.device("cuda"), info, dtype)
    planned = scheme.resident_bytes(spec_of("m", weight), info, dtype)
    assert abs(op.nbytes - planned) <= 0.02 * planned, op.kernel
    for m in (1, 16, 300):
        x = torch.randn(m, 512).to(dtype)
        got = op(x.cuda()).cpu()
        assert got.dtype is dtype
        assert relative_error(got, x.float() @ weight.t()) < limit, op.kernel
        assert relative_error(got, x.float() @ weight.roll(1, 0).t()) > 0.5
