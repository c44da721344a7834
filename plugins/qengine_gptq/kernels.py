"""GPTQ on a GPU: codes are repacked once, then run through the shared weight-only kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from qengine.plugin import DeviceInfo, LinearOp
from qengine_gptq.shards import Decoded
from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm import PackedWeight, pack_codes, wna16_matmul


@triton.jit
def unpack_2(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..3 in bits 2 * SLOT, 2 * SLOT + 1."""
    return (words >> (2 * SLOT)) & 0x3


@triton.jit
def unpack_4(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..15 in bits 4 * SLOT .. 4 * SLOT + 3."""
    return (words >> (4 * SLOT)) & 0xF


@triton.jit
def unpack_8(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..255 in bits 8 * SLOT .. 8 * SLOT + 7."""
    return (words >> (8 * SLOT)) & 0xFF


UNPACK: dict[int, Any] = {2: unpack_2, 4: unpack_4, 8: unpack_8}


class GptqCudaLinear(LinearOp):
    """y = x[:, order] @ W + b for W[k, n] = (q[k, n] - z[k // group_size, n]) * s[k // group_size, n].

    part        decoded weights on the device where the op runs; 3-bit codes are held in 4 bits
    bias        [N] or None
    symmetric   zeros that are all the middle are not kept
    dtype       of x and y
    info        the device: its compute capability picks the kernels

    The arguments are repacked (peak: the codes as one byte each) and not kept. Scales stay in their 16-bit dtype;
    float32 ones become float16, which is what the format defines.
    """

    def __init__(
        self, part: Decoded, bias: torch.Tensor | None, symmetric: bool, dtype: torch.dtype, info: DeviceInfo
    ) -> None:
        self.in_features, self.out_features = part.codes.shape
        scales, bits = part.scales, held_bits(part.bits)
        self.weight = PackedWeight(
            words=pack_codes(part.codes, bits),
            scales=(scales.half() if scales.dtype == torch.float32 else scales).contiguous(),
            zeros=None if symmetric and part.zeros is None else part.zeros_or_middle().contiguous(),
            in_features=self.in_features,
            group_size=part.group_size,
            symmetric_zero=1 << (part.bits - 1),
            bits=bits,
        )
        self.order = part.order
        self.bias = None if bias is None else bias.to(dtype)
        self.chip = Chip.of(part.codes.device)
        if info.sm:
            self.chip = replace(self.chip, sm=info.sm, shared_memory=info.shared_memory or self.chip.shared_memory)
        self.kernel = f"Triton W{bits}A16"
        if bits != part.bits:
            self.kernel += f" ({part.bits}-bit codes held in {bits} bits)"
        self.kernel += ", dequantise + cuBLAS above some hundred rows"
        if not self.chip.tensor_cores:
            self.kernel = self.kernel.replace("some hundred rows", f"16 rows (sm_{self.chip.sm}: tl.dot is plain FMA)")
        if self.order is not None:
            self.kernel += ", inputs sorted by group"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        return wna16_matmul(x, self.weight, self.bias, UNPACK[self.weight.bits], self.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {
            "words": self.weight.words,
            "scales": self.weight.scales,
            "zeros": self.weight.zeros,
            "order": self.order,
            "bias": self.bias,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def held_bits(bits: int) -> int:
    """Bits that a code takes on the GPU."""
    return 4 if bits == 3 else bits
