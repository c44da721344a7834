"""FP8 on a GPU: the shared linear as a plugin's op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qengine.plugin import DeviceInfo, LinearOp
from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear
from qengine_kernels.launch import Chip
from qengine_kernels.w8a16_gemm import ByteWeight


class Fp8CudaOp(LinearOp):
    """Native or weight-only, see `qengine_kernels.fp8_linear.cuda`."""

    def __init__(self, linear: Fp8CudaLinear) -> None:
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = linear.kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers()


def bind_cuda(
    weight: ByteWeight,
    bias: torch.Tensor | None,
    input_scales: Sequence[tuple[int, torch.Tensor]],
    info: DeviceInfo,
    dtype: torch.dtype,
    native: bool | None,
) -> Fp8CudaOp:
    """The op on the device where `weight` lies. `info` picks the mode: a compute capability below 8.9 in it means
    weight-only, whatever the GPU is; `native` False does too. No `input_scales`: dynamic activations."""
    chip = Chip.of(weight.codes.device)
    if info.sm:
        chip = replace(chip, sm=info.sm, shared_memory=info.shared_memory or chip.shared_memory)
    return Fp8CudaOp(
        Fp8CudaLinear(weight, bias, dtype, chip, input_scales=input_scales or None, native=native)
    )
