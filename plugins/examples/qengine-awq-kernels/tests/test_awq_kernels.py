"""The conformance kit with a stand-in for the extension, and what is said where the extension will not do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from qengine_awq_kernels import AutoAwqKernels, AutoAwqScheme, extension

from qengine.plugin import DeviceInfo, LinearSpec, TensorInfo
from qengine.plugin.conformance import WeightConformance
from qengine.plugin.discovery import load_plugin

STAND_IN = str(Path(__file__).parent / "stand_in")
H100 = DeviceInfo("cuda", "H100", (9, 0), 227 * 1024, 80 << 30)
SPEC = LinearSpec("model.layers.0.mlp.up_proj", 128, 64)


@pytest.fixture(autouse=True)
def no_extension() -> Iterator[None]:
    """Each test begins without the extension, whether or not it is installed."""
    sys.modules["awq_ext"] = None  # type: ignore[assignment]
    extension.cache_clear()
    yield
    sys.modules.pop("awq_ext", None)
    extension.cache_clear()


@pytest.fixture
def stand_in(no_extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_IN)
    sys.modules.pop("awq_ext")
    extension.cache_clear()


@pytest.mark.usefixtures("stand_in")
class TestAutoAwq(WeightConformance):
    plugin = load_plugin("weight", "awq")
    kernels = AutoAwqKernels
    targets = (90,)


def scheme(k: int = 128, group: int = 64, zeros: bool = True) -> AutoAwqScheme | None:
    """What the kernels make of an AWQ linear with 64 outputs."""
    groups = -(-k // group)
    headers = {"qweight": TensorInfo("qweight", "I32", (k, 8)), "scales": TensorInfo("scales", "F16", (groups, 64))}
    if zeros:
        headers["qzeros"] = TensorInfo("qzeros", "I32", (groups, 8))
    spec = LinearSpec("m", k, 64)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zeros, "version": "gemm"}
    base = load_plugin("weight", "awq").parse(config).scheme_for(spec, headers)
    assert base is not None
    found = AutoAwqKernels().scheme(base, spec)
    assert found is None or isinstance(found, AutoAwqScheme)
    return found


def test_without_the_extension_the_reason_is_said() -> None:
    own = scheme()
    assert own is not None
    answer = own.capability(H100, torch.float16)
    assert not answer and "autoawq-kernels does not load" in answer.reason


@pytest.mark.usefixtures("stand_in")
def test_limits() -> None:
    own = scheme()
    assert own is not None and own.capability(H100, torch.float16)
    assert "float16 only" in own.capability(H100, torch.bfloat16).reason
    assert "NVIDIA" in own.capability(DeviceInfo("cpu"), torch.float16).reason
    assert "7.5" in own.capability(DeviceInfo("cuda", "V100", (7, 0)), torch.float16).reason


def test_what_it_does_not_know_is_left_to_the_format() -> None:
    assert scheme(k=96, group=64) is None  # a shorter last group
    assert scheme(zeros=False) is None
    dense = load_plugin("weight", "dense").parse(None).scheme_for(SPEC, {"weight": TensorInfo("w", "F16", (64, 128))})
    assert dense is not None and AutoAwqKernels().scheme(dense, SPEC) is None


def test_an_extension_without_the_functions_is_said() -> None:
    sys.modules["awq_ext"] = type(sys)("awq_ext")
    extension.cache_clear()
    assert extension() == (None, "awq_ext has no gemm_forward_cuda, dequantize_weights_cuda")
