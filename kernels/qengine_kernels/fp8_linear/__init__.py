"""Linears over e4m3 weights for every format that stores them: stacking of shards, a CPU and a CUDA implementation.

Two modes. Native: activations are rounded to e4m3 too (per token, per token and block, or with a scale from the
checkpoint) and multiplied on matrix units for 8-bit floats. Weight-only: activations stay as they are. Either way a
weight stays one byte, with the scales it came with: those of fused modules are never merged.
"""

from qengine_kernels.fp8_linear.cpu import Fp8CpuLinear
from qengine_kernels.fp8_linear.weight import (
    Fp8Shard,
    fp8_bytes,
    holds_nan,
    native_reason,
    quantize_weight,
    stack_shards,
)

__all__ = ["Fp8CpuLinear", "Fp8Shard", "fp8_bytes", "holds_nan", "native_reason", "quantize_weight", "stack_shards"]
