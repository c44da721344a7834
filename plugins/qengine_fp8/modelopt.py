"""NVIDIA ModelOpt's FP8 checkpoints: AutoFP8's tensors under another config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qengine.plugin import Quantizer, TensorInfo, WeightSample, dummy_samples
from qengine_fp8.backend import Fp8Quant
from qengine_fp8.config import read_modelopt


class ModelOptQuant(Fp8Quant):
    """Reads `quant_method` "modelopt" with `quant_algo` FP8; its other algorithms are refused by name."""

    name = "modelopt"
    contract = 1
    methods = ("modelopt",)
    quantizes_at_load = False

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> ModelOptQuant:
        return cls(read_modelopt(config))

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        return None

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """A scale a tensor, without and with one for the activations."""
        configs = [{"quant_method": "modelopt", "quant_algo": "FP8"}]
        static = {"input_scale": TensorInfo("input_scale", "F32", ())}
        return [*dummy_samples(cls, configs), *dummy_samples(cls, configs, extra=static)]
