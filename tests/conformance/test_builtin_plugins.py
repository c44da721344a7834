"""The built-in formats pass the kit that third parties are held to. On a machine with a GPU, on that GPU too.

Without one, CPU code alone: the templates that the built-in formats share run under the kit in the interpreter with the
example packages and the generated ones, and what compiles is held by `tests/kernels/test_cross_compile.py`.
"""

from __future__ import annotations

from qengine.conformance.kv_suite import KVSubject
from qengine.conformance.places import places
from qengine.conformance.weight_suite import WeightSubject
from qengine.plugin.conformance import KVConformance, WeightConformance
from qengine_awq.backend import AwqQuant
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_dense.backend import DenseQuant
from qengine_dense.kv import AutoKV
from qengine_fp8.backend import Fp8Quant
from qengine_fp8.modelopt import ModelOptQuant
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


class TestAwq(OnCpu):
    plugin = AwqQuant


class TestGptq(OnCpu):
    plugin = GptqQuant


class TestFp8(OnCpu):
    plugin = Fp8Quant


class TestDense(OnCpu):
    plugin = DenseQuant


class TestModelOpt(OnCpu):
    plugin = ModelOptQuant


class TestCompressedTensors(OnCpu):
    plugin = CompressedTensorsQuant


class TestAuto(OnCpuKV):
    plugin = AutoKV


class TestFp8E4M3(OnCpuKV):
    plugin = Fp8E4M3KV


class TestFp8E5M2(OnCpuKV):
    plugin = Fp8E5M2KV
