"""Where the built-in KV dtypes run, what they cost and what they say about missing scales."""

import pytest
import torch

from qengine.plugin import AttentionSpec, DeviceInfo, KVDtype, KVLayout
from qengine_dense.kv import AutoKV
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
F16, BF16 = torch.float16, torch.bfloat16
PLUGINS: list[type[KVDtype]] = [AutoKV, Fp8E4M3KV, Fp8E5M2KV]


def gpu(major: int, minor: int) -> DeviceInfo:
    return DeviceInfo("cuda", f"sm_{major}{minor}", (major, minor))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda p: p.name)
def test_capability_by_gpu_generation(plugin: type[KVDtype]) -> None:
    for old in (gpu(7, 0), gpu(6, 1)):
        answer = plugin(SPEC, "k", F16).capability(old)
        assert not answer and "7.5" in answer.reason
    turing = plugin(SPEC, "v", BF16).capability(gpu(7, 5))
    assert not turing and "bfloat16" in turing.reason and "--dtype half" in turing.reason
    fp8 = plugin is not AutoKV
    for info, dtype in ((gpu(7, 5), F16), (gpu(8, 0), BF16), (gpu(8, 6), BF16)):
        assert plugin(SPEC, "k", dtype).capability(info).kind == ("emulated" if fp8 else "native")
    for info in (gpu(8, 9), gpu(9, 0), gpu(12, 0)):
        assert plugin(SPEC, "k", BF16).capability(info).kind == "native"
    assert plugin(SPEC, "k", BF16).capability(DeviceInfo("cpu")).kind == ("emulated" if fp8 else "native")


@pytest.mark.parametrize("plugin", PLUGINS[1:], ids=lambda p: p.name)
def test_fp8_halves_a_16_bit_block(plugin: type[KVDtype]) -> None:
    """Case sizes of C16: 16 KiB a 16-token block of 2 layers in 16 bits, 1024 bytes a token."""
    auto, fp8 = (
        KVLayout.of(16, *(kind(SPEC, side, F16).layout(16) for side in ("k", "v"))) for kind in (AutoKV, plugin)
    )
    assert 2 * auto.block_bytes == 16384
    assert fp8.block_bytes * 2 == auto.block_bytes
    assert plugin.uncalibrated_note() is not None and plugin.name in plugin.uncalibrated_note()
    assert AutoKV.uncalibrated_note() is None
