"""The built-in formats pass the kit that third parties are held to. On a machine with a GPU, on that GPU too.

Without one, the CUDA code of AWQ stands for all in the interpreter: the others share its kernels or have tests of their
own there, and what compiles is held by `tests/kernels/test_cross_compile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compressed_tensors_files import group_of, int_tensors, quant_config, weights
from qengine.conformance.kv_suite import KVSubject
from qengine.conformance.places import places
from qengine.conformance.weight_suite import WeightSubject
from qengine.plugin import LinearSpec, WeightSample
from qengine.plugin.conformance import KVConformance, WeightConformance
from qengine_awq.backend import AwqQuant
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_dense.backend import DenseQuant
from qengine_dense.kv import AutoKV
from qengine_fp8.backend import Fp8Quant
from qengine_gptq.backend import GptqQuant
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV


class OnCpu(WeightConformance):
    """CPU code alone where there is no GPU."""

    test_targets = None

    @classmethod
    def make_subject(cls, gpu: bool) -> WeightSubject:
        where = places(gpu)
        return WeightSubject(cls.plugin, where if gpu else where[:1], cls.samples())


class OnCpuKV(KVConformance):
    """The same for KV dtypes."""

    test_targets = None

    @classmethod
    def make_subject(cls, gpu: bool) -> KVSubject:
        where = places(gpu)
        return KVSubject(cls.plugin, where if gpu else where[:1])


class TestAwq(WeightConformance):
    plugin = AwqQuant
    targets = (75,)


class TestGptq(OnCpu):
    plugin = GptqQuant


class TestFp8(OnCpu):
    plugin = Fp8Quant


class TestDense(OnCpu):
    plugin = DenseQuant

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        w = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
        return [WeightSample(None, LinearSpec("model.layers.0.mlp.up_proj", 80, 48), {"weight": w})]


class TestCompressedTensors(OnCpu):
    plugin = CompressedTensorsQuant

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        w = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
        found = []
        for bits, symmetric in ((4, True), (4, False), (8, True)):
            tensors, _ = int_tensors(w, bits, 32, symmetric=symmetric)
            config = quant_config(group_of(weights(bits, "group", 32, symmetric=symmetric)))
            found.append(WeightSample(config, LinearSpec("model.layers.0.mlp.up_proj", 96, 32), tensors))
        return found


class TestAuto(OnCpuKV):
    plugin = AutoKV


class TestFp8E4M3(OnCpuKV):
    plugin = Fp8E4M3KV


class TestFp8E5M2(OnCpuKV):
    plugin = Fp8E5M2KV
