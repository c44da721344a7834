"""AWQ on a GPU: the checkpoint's words are repacked once, then run through the shared weight-only kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine.plugin import DeviceInfo, LinearOp
from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm import (
    PackedWeight,
    normal_group_size,
    pack_codes,
    packed_bytes,
    wna16_matmul,
)

COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's "gemm" packing: nibble s of word w holds output column 8 * w + COLUMN_OF_NIBBLE[s]."""


@triton.jit
def unpack_nibble(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..15 in bits 4 * SLOT .. 4 * SLOT + 3."""
    return (words >> (4 * SLOT)) & 0xF


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] in AWQ's order (qweight or qzeros) -> uint8 [R, N] codes."""
    out = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        out[..., column] = (words >> (4 * nibble)) & 0xF
    return out.flatten(-2)


def cuda_bytes(in_features: int, out_features: int, group_size: int, zeros: bool, bias_bytes: int) -> int:
    """Bytes that `AwqCudaLinear` keeps; `bias_bytes` is 0 without a bias, scales are 16-bit."""
    group = normal_group_size(group_size, in_features)
    return packed_bytes(in_features, out_features, group, zeros) + bias_bytes


class AwqCudaLinear(LinearOp):
    """y = x @ W + b for W[k, n] = (q[k, n] - z[k // group_size, n]) * s[k // group_size, n].

    qweight     int32 [K, N / 8], qzeros int32 [G, N / 8] or None (every zero is 8), scales [G, N] float16 or bfloat16,
                bias [N] or None, all on the device where the op runs; group_size -1 is one group, the last may be short
    dtype       of x and y

    The arguments are repacked (peak: the codes as one byte each) and not kept.
    """

    def __init__(
        self,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int,
        dtype: torch.dtype,
        info: DeviceInfo,
    ) -> None:
        self.in_features, self.out_features = qweight.shape[0], qweight.shape[1] * 8
        group = normal_group_size(group_size, self.in_features)
        need = (-(-self.in_features // group), self.out_features)
        if tuple(scales.shape) != need:
            raise ValueError(f"AWQ scales have shape {tuple(scales.shape)}; need {need} for group size {group}")
        self.weight = PackedWeight(
            words=pack_codes(unpack_awq(qweight)),
            scales=scales.contiguous(),
            zeros=None if qzeros is None else unpack_awq(qzeros),
            in_features=self.in_features,
            group_size=group,
        )
        self.bias = None if bias is None else bias.to(dtype)
        self.chip = Chip.of(qweight.device)
        self.kernel = (
            "Triton W4A16, dequantise + cuBLAS for large M"
            if self.chip.tensor_cores
            else f"Triton W4A16 for few rows, dequantise + cuBLAS above (no tensor cores in Triton on sm_{info.sm})"
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return wna16_matmul(x, self.weight, self.bias, unpack_nibble, self.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {
            "words": self.weight.words,
            "scales": self.weight.scales,
            "zeros": self.weight.zeros,
            "bias": self.bias,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}
