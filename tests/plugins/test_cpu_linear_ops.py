"""Every way a plugin binds a linear on a CPU, against float32 with the dequantised weight."""

import pytest
import torch

from qengine.plugin import DeviceInfo, LinearOp, LinearScheme, LinearShard, LinearSpec, TensorInfo
from qengine_awq.backend import AwqQuant, AwqScheme
from qengine_dense.backend import DenseQuant, DenseScheme
from qengine_kernels.testing import relative_error

CPU, INFO = torch.device("cpu"), DeviceInfo("cpu")
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 1e-6}
BATCHES = (1, 2, 17, 70)


def awq_shard(name: str, k: int, n: int, group: int, zero_point: bool, bias: bool) -> LinearShard:
    groups = 1 if group == -1 else -(-k // group)
    words = lambda rows: torch.randint(-(2**31), 2**31, (rows, n // 8), dtype=torch.int64).to(torch.int32)  # noqa: E731
    tensors = {"qweight": words(k), "scales": (torch.rand(groups, n) * 0.02 + 0.005).half()}
    if zero_point:
        tensors["qzeros"] = words(groups)
    if bias:
        tensors["bias"] = torch.randn(n).half()
    return LinearShard(LinearSpec(name, k, n, bias), tensors)


def reference(scheme: LinearScheme, shards: list[LinearShard]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([scheme.dequantize(s.spec, s.tensors) for s in shards])
    bias = torch.cat([s.tensors["bias"].float() for s in shards]) if shards[0].spec.bias else None
    return weight, bias


def check(op: LinearOp, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert (op.out_features, op.in_features) == weight.shape
    for m in BATCHES:
        x = torch.randn(m, op.in_features).to(dtype)
        want = torch.nn.functional.linear(x.float(), weight, bias)
        y = op(x)
        assert y.dtype is dtype and y.shape == want.shape
        assert relative_error(y, want) < LIMIT[dtype], (op.kernel, m)
        assert relative_error(y, torch.nn.functional.linear(x.float(), weight.roll(1, 0), bias)) > 0.1


SHAPES = [(128, 64, 64), (128, 48, 32), (96, 24, 64), (256, 128, 128), (128, 64, -1), (200, 16, 32), (48, 16, 16)]


@pytest.mark.parametrize("k, n, group", SHAPES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_awq(k: int, n: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for zero_point, bias, count, small in ((True, False, 3, False), (False, True, 2, False), (True, True, 1, True)):
        scheme: LinearScheme = AwqScheme(group, zero_point)
        if small:
            scheme = scheme.compact() or scheme
        shards = [awq_shard(f"m{i}", k, n, group, zero_point, bias) for i in range(count)]
        weight, b = reference(scheme, shards)
        op = scheme.bind(shards, CPU, INFO, dtype)
        assert not any(s.tensors for s in shards), "bind takes ownership"
        check(op, weight, b, dtype)
        assert op.nbytes == scheme.resident_bytes(LinearSpec("m", k, n * count, bias), INFO, dtype)


def test_awq_keeps_fewer_bytes_when_compact() -> None:
    spec = LinearSpec("m", 576, 1536)
    full, compact = AwqScheme(64, True), AwqScheme(64, True).compact()
    assert compact is not None and compact.compact() is None and compact.key != full.key
    small = compact.resident_bytes(spec, INFO, torch.bfloat16)
    assert small < 0.6 * 576 * 1536 < 2 * 576 * 1536 < full.resident_bytes(spec, INFO, torch.bfloat16)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_dense(stored: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    code = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[stored]
    for k, n, bias, count in ((128, 64, False, 1), (64, 24, True, 3), (33, 10, True, 2)):
        specs = [LinearSpec(f"m{i}", k, n, bias) for i in range(count)]
        scheme = DenseQuant.parse(None).scheme_for(specs[0], {"weight": TensorInfo("m0.weight", code, (n, k))})
        assert isinstance(scheme, DenseScheme)
        tensors = [{"weight": torch.randn(n, k).to(stored)} for _ in specs]
        if bias:
            tensors = [t | {"bias": torch.randn(n).to(stored)} for t in tensors]
        shards = [LinearShard(s, t) for s, t in zip(specs, tensors, strict=True)]
        weight, b = reference(scheme, shards)
        op = scheme.bind(shards, CPU, INFO, dtype)
        check(op, weight, b, dtype)
        assert op.nbytes == scheme.resident_bytes(LinearSpec("m", k, n * count, bias), INFO, dtype)


def test_dense_leaves_other_modules_alone() -> None:
    spec = LinearSpec("m", 8, 8)
    assert DenseQuant.parse(None).scheme_for(spec, {"qweight": TensorInfo("m.qweight", "I32", (8, 1))}) is None


def test_capability_of_dense_weights() -> None:
    scheme = DenseScheme()
    assert not scheme.capability(DeviceInfo("cuda", "V100", (7, 0)), torch.float16)
    turing = scheme.capability(DeviceInfo("cuda", "T4", (7, 5)), torch.bfloat16)
    assert not turing and "--dtype half" in turing.reason
    assert scheme.capability(DeviceInfo("cuda", "T4", (7, 5)), torch.float16)
    assert scheme.capability(INFO, torch.bfloat16)


def test_awq_report_names_the_switch() -> None:
    op = AwqScheme(64, True).bind([awq_shard("m", 128, 64, 64, True, False)], CPU, INFO, torch.bfloat16)
    assert "measured" in op.kernel
    exact = AwqScheme(64, True).bind([awq_shard("m", 128, 64, 64, True, False)], CPU, INFO, torch.float32)
    assert "float32" in exact.kernel
    assert AwqQuant.name == "awq"
