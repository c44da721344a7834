"""The built-in plugins bound on a real GPU: same meaning as dequantised float32, bytes as planned."""

import pytest
import torch

from awq_files import write_linear
from paged_cases import empty_storage, paged_case
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import AttentionSpec, DeviceInfo, KVDtype, KVLayout, KVScales, LinearShard, LinearSpec
from qengine_awq.backend import AwqScheme
from qengine_awq.layouts import LAYOUTS
from qengine_dense.backend import DenseScheme
from qengine_dense.kv import AutoKV
from qengine_kernels.paged_attention import paged_attention_reference
from qengine_kernels.testing import relative_error
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def info() -> DeviceInfo:
    p = torch.cuda.get_device_properties(0)
    return DeviceInfo("cuda", p.name, (p.major, p.minor), p.shared_memory_per_block_optin, p.total_memory)


@pytest.mark.parametrize("group", [64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_awq_fused(group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scheme = AwqScheme(group, True)
    groups = 1 if group == -1 else 256 // group
    words = lambda rows, n: torch.randint(-(2**31), 2**31, (rows, n // 8), dtype=torch.int64).int()  # noqa: E731
    shards = [
        LinearShard(
            LinearSpec(f"m{n}", 256, n, True),
            {
                "qweight": words(256, n),
                "qzeros": words(groups, n),
                "scales": (torch.rand(groups, n) * 0.02 + 0.005).half(),
                "bias": torch.randn(n).half(),
            },
        )
        for n in (256, 64, 64)
    ]
    weight = torch.cat([scheme.dequantize(s.spec, s.tensors) for s in shards])
    bias = torch.cat([s.tensors["bias"] for s in shards]).float()
    op = scheme.bind(shards, GPU, info(), dtype)
    assert op.nbytes == scheme.resident_bytes(LinearSpec("m", 256, 384, True), info(), dtype)
    for m in (1, 16, 300):
        x = torch.randn(m, 256).to(dtype)
        got = op(x.to(GPU)).cpu()
        want = torch.nn.functional.linear(x.float(), weight, bias)
        assert got.dtype is dtype and relative_error(got, want) < 8e-3
        assert relative_error(got, torch.nn.functional.linear(x.float(), weight.roll(1, 0), bias)) > 0.1


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast", "llm-awq", "marlin"])
def test_awq_layouts(version: str) -> None:
    """Every layout is repacked on the GPU and then means what an independent writer wrote."""
    torch.manual_seed(0)
    layout = next(layout for layout in LAYOUTS if layout.name == version)
    scheme = AwqScheme(128, version != "marlin", layout=layout)
    made = {n: write_linear(torch.randn(n, 256) * 0.05, version, 128) for n in (256, 64)}
    shards = [LinearShard(LinearSpec(f"m{n}", 256, n), tensors) for n, (tensors, _) in made.items()]
    weight = torch.cat([meaning for _, meaning in made.values()])
    op = scheme.bind(shards, GPU, info(), torch.float16)
    assert op.nbytes == scheme.resident_bytes(LinearSpec("m", 256, 320), info(), torch.float16)
    for m in (1, 16, 300):
        x = torch.randn(m, 256).half()
        got, want = op(x.to(GPU)).cpu(), torch.nn.functional.linear(x.float(), weight)
        assert relative_error(got, want) < 8e-3
        assert relative_error(got, torch.nn.functional.linear(x.float(), weight.roll(1, 0))) > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dense(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(96, 64), torch.randn(96)
    scheme = DenseScheme()
    spec = LinearSpec("m", 64, 96, True)
    op = scheme.bind([LinearShard(spec, {"weight": weight, "bias": bias})], GPU, info(), dtype)
    assert op.nbytes == scheme.resident_bytes(spec, info(), dtype)
    x = torch.randn(5, 64).to(dtype)
    want = torch.nn.functional.linear(x.float(), weight, bias)
    assert relative_error(op(x.to(GPU)).cpu(), want) < 8e-3


@pytest.mark.parametrize("plugin", [AutoKV, Fp8E4M3KV, Fp8E5M2KV], ids=lambda p: p.name)
def test_kv_layer(plugin: type[KVDtype]) -> None:
    """A prompt and decodes through the cache that `bind_kv_layer` picks on CUDA."""
    torch.manual_seed(0)
    spec = AttentionSpec(8, 2, 64, 0.125)
    case = paged_case(spec, [1, 40], [1, 40], torch.float16, GPU)
    sides = plugin(spec, "k", torch.float16), plugin(spec, "v", torch.float16)
    layout = KVLayout.of(16, *(side.layout(16) for side in sides))
    one = plugin.max_value is None
    k_scale = torch.ones(2) if one else torch.tensor([0.02, 0.05])
    v_scale = torch.ones(2) if one else torch.tensor([0.03, 0.01])
    storage = empty_storage(layout, len(case.keys), GPU)
    cache = bind_kv_layer(*sides, layout, storage, KVScales(k_scale, v_scale), info())
    cache.write(case.cached(case.keys).half(), case.cached(case.values).half(), case.batch, 0)
    got = cache.attend(case.q, case.batch, 0).cpu()

    def through(x: torch.Tensor, scale: torch.Tensor, side: KVDtype) -> torch.Tensor:
        stored = side.encode(x.cpu() * (1.0 / scale)[:, None]).to(side.layout(16).dtype)
        return side.decode(stored, torch.float32) * scale[:, None]

    k, v = through(case.keys, k_scale, sides[0]), through(case.values, v_scale, sides[1])
    want = paged_attention_reference(
        case.q.cpu(), k, v, case.tables.cpu(), case.batch.host_query_lens, case.batch.host_seq_lens, spec.scale
    )
    assert relative_error(got, want) < 3e-3


@pytest.mark.parametrize("plugin", [Fp8E4M3KV, Fp8E5M2KV], ids=lambda p: p.name)
def test_torch_twins_on_the_gpu(plugin: type[KVDtype]) -> None:
    side = plugin(AttentionSpec(1, 1, 16, 1.0), "k", torch.float16)
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        side.decode(codes.to(GPU), torch.float32).cpu(), side.decode(codes, torch.float32), equal_nan=True
    )
    x = torch.cat([torch.randn(10_000) * 100, torch.tensor([float("nan"), 1e9, -1e9, -0.0])])
    assert torch.equal(side.encode(x.to(GPU)).cpu(), side.encode(x))
