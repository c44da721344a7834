"""Every way a compressed-tensors linear is bound on a CPU, against float32 with the weights that its writer meant."""

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
from qengine_compressed_tensors.int8 import Int8Scheme
from qengine_compressed_tensors.weight_only import WeightOnlyInt
from qengine_kernels.testing import relative_error

CPU, INFO = torch.device("cpu"), DeviceInfo("cpu")
LIMIT = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 2e-6}
Case = tuple[LinearScheme, list[LinearShard], torch.Tensor, torch.Tensor | None]


def case(
    config: dict[str, Any],
    parts: list[tuple[dict[str, torch.Tensor], torch.Tensor]],
    bias: bool = False,
) -> Case:
    """The scheme that a config and tensors give (all shards must agree), the shards, and the dense meaning."""
    quant = CompressedTensorsQuant.parse(config)
    shards, schemes = [], []
    for i, (tensors, meaning) in enumerate(parts):
        spec = spec_of(f"model.layers.0.m{i}", meaning, bias)
        if bias:
            tensors = tensors | {"bias": torch.randn(spec.out_features).bfloat16()}
        scheme = quant.scheme_for(spec, headers(spec.name, tensors))
        assert scheme is not None
        held = headers(spec.name, tensors)
        for need in [need for need in scheme.tensors(spec) if need.required or need.leaf in held]:
            assert held[need.leaf].shape == need.shape and held[need.leaf].dtype in need.dtypes, need
        assert {need.leaf for need in scheme.tensors(spec)} >= set(tensors), "a tensor that nobody asks for"
        assert torch.allclose(scheme.dequantize(spec, tensors), meaning, rtol=1e-6, atol=1e-7)
        schemes.append(scheme)
        shards.append(LinearShard(spec, dict(tensors)))
    assert all(scheme.key == schemes[0].key for scheme in schemes)
    biases = torch.cat([s.tensors["bias"].float() for s in shards]) if bias else None
    return schemes[0], shards, torch.cat([meaning for _, meaning in parts]), biases


def check(c: Case, dtype: torch.dtype, limit: float | None = None) -> None:
    """Bytes as planned, results within the limit, other rows' weights far away."""
    scheme, shards, weight, bias = c
    whole = spec_of("m", weight, bias is not None)
    op = scheme.bind([LinearShard(s.spec, dict(s.tensors)) for s in shards], CPU, INFO, dtype)
    assert op.nbytes == scheme.resident_bytes(whole, INFO, dtype), op.kernel
    for m in (1, 3, 40):
        x = torch.randn(m, weight.shape[1]).to(dtype)
        want = torch.nn.functional.linear(x.float(), weight, bias)
        got = op(x)
        assert got.dtype is dtype and got.shape == want.shape
        assert relative_error(got, want) < (limit or LIMIT[dtype]), (op.kernel, m)
        wrong = torch.nn.functional.linear(x.float(), weight.roll(1, 0), bias)
        assert relative_error(got, wrong) > 0.2


def parts_of(count: int, n: int, k: int, bits: int, group: int, **options: Any) -> list[Any]:
    return [int_tensors(torch.randn(n, k) * 0.05, bits, group, **options) for _ in range(count)]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packed_groups(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(bits)
    for layout, zeros, group, scale in (
        ("dense", "packed", 32, torch.bfloat16),
        ("padded", "packed", 64, torch.float16),
        ("dense", "plain", -1, torch.float32),
    ):
        strategy = weights(bits, "channel" if group == -1 else "group", None if group == -1 else group)
        config = quant_config(group_of(strategy | {"symmetric": symmetric}))
        options = {"symmetric": symmetric, "layout": layout, "zeros": zeros, "scale_dtype": scale}
        c = case(config, parts_of(2, 48, 128, bits, group, **options), bias=bits % 2 == 0)
        assert isinstance(c[0], WeightOnlyInt) and c[0].stored.zeros is (None if symmetric else c[0].stored.zeros)
        check(c, dtype)
        small = c[0].compact()
        assert small is not None and small.compact() is None
        check((small, *c[1:]), dtype)


def test_compact_is_smaller() -> None:
    spec = spec_of("m", torch.empty(512, 512))
    for bits, most in ((4, 0.6), (8, 1.2)):
        config = quant_config(group_of(weights(bits, "group", 64)))
        scheme, *_ = case(config, parts_of(1, 512, 512, bits, 64))
        small = scheme.compact()
        assert small is not None
        full, least = (s.resident_bytes(spec, INFO, torch.bfloat16) for s in (scheme, small))
        assert least < most * 512 * 512 < full


@pytest.mark.parametrize("n, k, group", [(40, 200, 32), (16, 96, 64), (33, 60, -1)])
def test_awkward_shapes(n: int, k: int, group: int) -> None:
    """Ragged last groups, rows that fill no word, outputs that fill no word of zero points."""
    torch.manual_seed(1)
    args = weights(4, "channel" if group == -1 else "group", None if group == -1 else group, symmetric=False)
    for dtype in (torch.float32, torch.bfloat16):
        check(case(quant_config(group_of(args)), parts_of(2, n, k, 4, group, symmetric=False)), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fused", ["same", "different"])
def test_act_order(bits: int, fused: str) -> None:
    """Fused shards whose channels are ordered alike run as one; others run side by side and stay right."""
    torch.manual_seed(2)
    maps = [(torch.arange(128) // 32)[torch.randperm(128)] for _ in range(2)]
    maps = [maps[0], maps[0]] if fused == "same" else maps
    parts = [int_tensors(torch.randn(n, 128) * 0.05, bits, 32, g_idx=g) for n, g in zip((48, 16), maps, strict=True)]
    config = quant_config(group_of(weights(bits, "group", 32, actorder="group")), version="0.12.2")
    scheme, shards, weight, _ = case(config, parts)
    op = scheme.bind([LinearShard(s.spec, dict(s.tensors)) for s in shards], CPU, INFO, torch.float32)
    x = torch.randn(5, 128)
    assert relative_error(op(x), x @ weight.t()) < 1e-6
    small = scheme.compact()
    assert small is not None
    packed = small.bind([LinearShard(s.spec, dict(s.tensors)) for s in shards], CPU, INFO, torch.bfloat16)
    assert ("one by one" in packed.kernel) == (fused == "different")
    assert relative_error(packed(x.bfloat16()), x.bfloat16().float() @ weight.t()) < LIMIT[torch.bfloat16]
    if fused == "same":
        assert op.nbytes == scheme.resident_bytes(spec_of("m", weight), INFO, torch.float32)
        assert packed.nbytes == small.resident_bytes(spec_of("m", weight), INFO, torch.bfloat16)
    unsorted = [{**s.tensors, "weight_g_idx": (torch.arange(128) // 32).int()} for s in shards]
    wrong = scheme.bind(
        [LinearShard(s.spec, t) for s, t in zip(shards, unsorted, strict=True)], CPU, INFO, torch.float32
    )
    assert relative_error(wrong(x), x @ weight.t()) > 0.1


def test_g_idx_that_is_not_set_means_nothing() -> None:
    parts = parts_of(1, 16, 64, 4, 32)
    parts[0][0]["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    check(case(quant_config(group_of(weights(4, "group", 32, actorder="group"))), parts), torch.float32)


@pytest.mark.parametrize("bits, symmetric", [(3, True), (3, False), (4, True), (8, False)])
def test_naive_quantised_bytes(bits: int, symmetric: bool) -> None:
    """Fewer than 8 bits as int8, as llm-compressor 0.8 wrote 3-bit weights."""
    torch.manual_seed(3)
    args = weights(bits, "group", 32, symmetric=symmetric)
    parts = parts_of(2, 24, 64, bits, 32, symmetric=symmetric, layout="bytes")
    check(case(quant_config(group_of(args), form="naive-quantized"), parts), torch.float32)


def test_one_scale_for_all() -> None:
    """Two shards with a scale each: never merged."""
    torch.manual_seed(4)
    args = weights(8, "tensor", symmetric=False)
    parts = [int_tensors(torch.randn(24, 64) * s, 8, -1, per_tensor=True, symmetric=False) for s in (0.1, 1.0)]
    check(case(quant_config(group_of(args)), parts), torch.float32)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_fp8(strategy: str, dtype: torch.dtype) -> None:
    """On a CPU weights stay one byte and activations as they are, whatever the config asks."""
    torch.manual_seed(5)
    block = [32, 64] if strategy == "block" else None
    inputs = FP8_DYNAMIC | ({"strategy": "group", "group_size": 64} if block else {})
    parts = [fp8_tensors(torch.randn(n, 160) * s, strategy, (32, 64)) for n, s in ((64, 0.1), (32, 1.0))]
    for activations in (inputs, None):
        config = quant_config(group_of(fp8_weights(strategy, block), inputs=activations), form="float-quantized")
        c = case(config, parts, bias=True)
        # torch's bf16 GEMM of unscaled codes rounds codes' products only at the end, so 16-bit limits hold
        check(c, dtype)
        size = c[0].resident_bytes(spec_of("m", c[2]), INFO, dtype)
        assert size < 1.1 * c[2].numel() + 1000
        answer = c[0].capability(INFO, dtype)
        assert answer.kind == "emulated" and "weight-only" in answer.reason


def test_fp8_static_scales_are_checked_and_not_used_on_a_cpu() -> None:
    static = FP8_DYNAMIC | {"strategy": "tensor", "dynamic": False}
    config = quant_config(group_of(fp8_weights("tensor"), inputs=static), form="float-quantized")
    tensors, meaning = fp8_tensors(torch.randn(16, 32), "tensor")
    tensors["input_scale"] = torch.tensor([0.02]).bfloat16()
    tensors["weight_zero_point"] = torch.zeros(1).to(torch.float8_e4m3fn)
    c = case(config, [(tensors, meaning)])
    check(c, torch.float32)
    assert "static" in c[0].format
    scales = (("weight_scale", 0.0), ("weight_scale", -1.0), ("input_scale", 0.0), ("input_scale", float("nan")))
    for leaf, bad in (*scales, ("weight_zero_point", 1.0)):
        spoiled = dict(c[1][0].tensors) | {leaf: torch.tensor([bad])}
        with pytest.raises(ValueError, match=leaf):
            c[0].bind([LinearShard(c[1][0].spec, spoiled)], CPU, INFO, torch.float32)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_int8_activations(dtype: torch.dtype, per_tensor: bool) -> None:
    """Held to the definition of the rounded activations, which plain activations miss."""
    torch.manual_seed(6)
    args = weights(8, "tensor" if per_tensor else "channel")
    options = {"layout": "bytes", "per_tensor": per_tensor}
    config = quant_config(group_of(args, inputs=INT8_DYNAMIC), form="int-quantized")
    scheme, shards, weight, bias = case(config, parts_of(2, 40, 96, 8, -1, **options), bias=True)
    assert isinstance(scheme, Int8Scheme)
    op = scheme.bind([LinearShard(s.spec, dict(s.tensors)) for s in shards], CPU, INFO, dtype)
    assert op.nbytes == scheme.resident_bytes(spec_of("m", weight, True), INFO, dtype) < 1.2 * weight.numel()
    x = (torch.randn(7, 96) * torch.logspace(-2, 2, 7)[:, None]).to(dtype)
    x[3] = 0
    scale = x.float().abs().amax(1, keepdim=True) / 127.5
    rounded = (x.float() / scale).nan_to_num().clamp(-128, 127).round() * scale
    limit = {torch.float32: 1e-6}.get(dtype, LIMIT[dtype])
    got = op(x).float()
    assert relative_error(got, rounded @ weight.t() + bias) < limit
    if dtype is torch.float32:
        assert relative_error(got, x @ weight.t() + bias) > 1e-3, "control: activations are rounded"


def test_int8_static_activations() -> None:
    torch.manual_seed(7)
    static = INT8_DYNAMIC | {"strategy": "tensor", "dynamic": False}
    config = quant_config(group_of(weights(8, "channel"), inputs=static), form="int-quantized")
    parts = parts_of(2, 16, 64, 8, -1, layout="bytes")
    for tensors, _ in parts:
        tensors["input_scale"] = torch.tensor([0.02])
        tensors["input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    scheme, shards, weight, _ = case(config, parts)
    op = scheme.bind([LinearShard(s.spec, dict(s.tensors)) for s in shards], CPU, INFO, torch.float32)
    x = torch.randn(4, 64) * 2
    rounded = (x / 0.02).clamp(-128, 127).round() * 0.02
    assert relative_error(op(x), rounded @ weight.t()) < 1e-6
    assert relative_error(op(x), x @ weight.t()) > 1e-3
    shards[1].tensors["input_zero_point"] = torch.ones(1, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"m1\.input_zero_point"):
        scheme.bind(shards, CPU, INFO, torch.float32)


def test_a_row_that_is_not_finite_stays_so() -> None:
    config = quant_config(group_of(weights(8, "channel"), inputs=INT8_DYNAMIC), form="int-quantized")
    scheme, shards, _, _ = case(config, parts_of(1, 16, 64, 8, -1, layout="bytes"))
    op = scheme.bind(shards, CPU, INFO, torch.float32)
    x = torch.randn(3, 64)
    x[0, 3], x[2, 5] = float("nan"), float("inf")
    y = op(x)
    assert not y[0].isfinite().any() and y[1].isfinite().all() and not y[2].isfinite().any()


def test_activations_that_are_not_rounded_are_said_to_be() -> None:
    """Four-bit weights with int8 activations: the weights are right, and the report says what is not done."""
    config = quant_config(group_of(weights(4, "group", 32), inputs=INT8_DYNAMIC))
    c = case(config, parts_of(1, 16, 64, 4, 32))
    assert isinstance(c[0], WeightOnlyInt) and "dynamic int8 per token" in c[0].notes[0]
    check(c, torch.float32)


def test_capability() -> None:
    turing, hopper = DeviceInfo("cuda", "T4", (7, 5)), DeviceInfo("cuda", "H200", (9, 0))
    volta = DeviceInfo("cuda", "V100", (7, 0))
    packed = case(quant_config(group_of(weights(4, "group", 32))), parts_of(1, 16, 64, 4, 32))[0]
    fp8 = case(
        quant_config(group_of(fp8_weights("channel"), inputs=FP8_DYNAMIC), form="float-quantized"),
        [fp8_tensors(torch.randn(16, 64), "channel")],
    )[0]
    for scheme in (packed, fp8):
        assert not scheme.capability(volta, torch.float16)
        refused = scheme.capability(turing, torch.bfloat16)
        assert not refused and "--dtype half" in refused.reason
        assert scheme.capability(hopper, torch.bfloat16).kind == "native"
    emulated = fp8.capability(turing, torch.float16)
    assert emulated.kind == "emulated" and "one byte" in emulated.reason
