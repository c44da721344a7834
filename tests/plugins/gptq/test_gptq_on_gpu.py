"""GPTQ bound on a real GPU: fused shards, act-order with equal and different maps, bytes as planned."""

from __future__ import annotations

import pytest
import torch

from gptq_files import Style, quantize
from qengine.plugin import DeviceInfo, LinearShard, LinearSpec
from qengine_gptq.backend import GptqScheme, SideBySide
from qengine_gptq.zeros import ZeroRule
from qengine_kernels.testing import relative_error

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def info() -> DeviceInfo:
    p = torch.cuda.get_device_properties(0)
    return DeviceInfo("cuda", p.name, (p.major, p.minor), p.shared_memory_per_block_optin, p.total_memory)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("maps", [(None, None, None), (1, 1, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gptq_fused(bits: int, maps: tuple[int | None, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shards, weights = [], []
    for n, shuffle in zip((256, 64, 64), maps, strict=True):
        tensors, meaning = quantize(torch.randn(n, 512), Style(bits, 128, False, "gptq_v2", shuffle=shuffle))
        tensors["bias"] = torch.randn(n).half()
        shards.append(LinearShard(LinearSpec(f"m{n}", 512, n, True), tensors))
        weights.append(meaning)
    weight, bias = torch.cat(weights), torch.cat([s.tensors["bias"] for s in shards]).float()
    scheme = GptqScheme(bits, 128, ZeroRule("gptq_v2", False), maps[0] is not None)
    op = scheme.bind(shards, GPU, info(), dtype)
    assert isinstance(op, SideBySide) == (len(set(maps)) > 1)
    if not isinstance(op, SideBySide):
        assert op.nbytes == scheme.resident_bytes(LinearSpec("m", 512, 384, True), info(), dtype)
    for m in (1, 16, 100, 300):
        x = torch.randn(m, 512).to(dtype)
        got = op(x.to(GPU)).cpu()
        want = torch.nn.functional.linear(x.float(), weight, bias)
        assert got.dtype is dtype and relative_error(got, want) < 8e-3
        for wrong in (weight.roll(1, 0), weight.roll(1, 1)):
            assert relative_error(got, torch.nn.functional.linear(x.float(), wrong, bias)) > 0.1
