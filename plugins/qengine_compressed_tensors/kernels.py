"""Integer weights of compressed-tensors on a GPU: repacked once, then run through the shared weight-only kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from qengine.plugin import DeviceInfo, LinearOp
from qengine_compressed_tensors.int8 import LARGEST
from qengine_compressed_tensors.integers import Codes
from qengine_kernels.launch import Chip
from qengine_kernels.quantize_rows import quantize_rows
from qengine_kernels.w8a8_gemm import w8a8_matmul
from qengine_kernels.w8a16_gemm import ByteWeight
from qengine_kernels.wna16_gemm import (
    PackedWeight,
    TiledWeight,
    held_weight,
    normal_group_size,
    pack_codes,
    wna16_matmul,
)


@triton.jit
def unpack_pair(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..3 in bits 2 * SLOT and up."""
    return (words >> (2 * SLOT)) & 0x3


@triton.jit
def unpack_nibble(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..15 in bits 4 * SLOT and up."""
    return (words >> (4 * SLOT)) & 0xF


@triton.jit
def unpack_byte(words, SLOT: tl.constexpr):
    """int32 words -> codes 0..255 in bits 8 * SLOT and up."""
    return (words >> (8 * SLOT)) & 0xFF


@triton.jit
def int8_encode(x, NATIVE: tl.constexpr):
    """float32 block -> int8 codes, to nearest even and saturating, as uint8."""
    b_clamped = tl.minimum(tl.maximum(x, -128.0), 127.0)
    b_whole = (b_clamped + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: the float32 adder rounds to whole numbers
    return b_whole.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def int8_dot(a, w, NATIVE: tl.constexpr):
    """uint8 blocks of int8 codes -> their product, float32 (exact: a block has at most 256 columns)."""
    b_a = a.to(tl.int8, bitcast=True)
    b_w = w.to(tl.int8, bitcast=True)
    if NATIVE:
        return tl.dot(b_a, b_w, out_dtype=tl.int32).to(tl.float32)
    else:
        return tl.dot(b_a.to(tl.float16), b_w.to(tl.float16))


@triton.jit
def int8_decode(codes, NATIVE: tl.constexpr):
    """uint8 blocks of int8 codes -> their values, float16."""
    return codes.to(tl.int8, bitcast=True).to(tl.float16)


UNPACK: dict[int, Any] = {2: unpack_pair, 4: unpack_nibble, 8: unpack_byte}


def held_bits(bits: int) -> int:
    """The width that codes of `bits` bits are held in on a GPU: the shared layout knows 2, 4 and 8."""
    return next(b for b in (2, 4, 8) if b >= bits)


def chip_of(device: torch.device, info: DeviceInfo) -> Chip:
    """The chip that kernels are picked for: the device's, with what `info` says of it."""
    chip = Chip.of(device)
    return replace(chip, sm=info.sm, shared_memory=info.shared_memory or chip.shared_memory) if info.sm else chip


class IntCudaLinear(LinearOp):
    """y = x[:, order] @ ((codes - zeros) * scales).T + bias.

    weight      see `Codes`, on the device where the op runs; repacked here
    bits        of the stored codes; `held_bits` of them are kept. `middle` is the zero of symmetric weights
    group_size  -1 is one group, the last one may be short
    dtype       of x and y
    info        the device: its compute capability picks the kernels
    tiles       whether the weight may be kept in the layout that only a linear on its own takes
    """

    def __init__(
        self,
        weight: Codes,
        bits: int,
        middle: int,
        group_size: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        info: DeviceInfo,
        *,
        tiles: bool = True,
    ) -> None:
        self.out_features, self.in_features = weight.codes.shape
        held = held_bits(bits)
        packed = PackedWeight(
            words=pack_codes(weight.codes.t().contiguous(), held),
            scales=weight.scales.t().contiguous(),
            zeros=None if weight.zeros is None else weight.zeros.t().contiguous(),
            in_features=self.in_features,
            group_size=normal_group_size(group_size, self.in_features),
            symmetric_zero=middle,
            bits=held,
        )
        self.order = weight.order
        self.bias = None if bias is None else bias.to(dtype)
        self.unpack = UNPACK[held]
        self.chip = chip_of(weight.codes.device, info)
        self.bits = held
        self.weight: PackedWeight | TiledWeight = held_weight(packed, dtype, self.chip) if tiles else packed
        self.kind = f"Triton W{held}A16" + ("" if held == bits else f" ({bits}-bit codes are held in {held} bits)")
        rows = "some hundred rows"
        if not self.chip.tensor_cores:
            rows = f"16 rows (sm_{self.chip.sm}: tl.dot is plain FMA)"
        self.kernel = f"{self.kind}, dequantise + cuBLAS above {rows}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        return wna16_matmul(x, self.weight, self.bias, self.unpack, self.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {"order": self.order, "bias": self.bias}
        return self.weight.buffers() | {name: tensor for name, tensor in named.items() if tensor is not None}


LIBRARY_ROWS = 17
"""The fewest rows that torch's int8 GEMM takes on CUDA."""
DOT_ROWS = 64
"""Up to how many rows the Triton kernel runs where the library could."""


class Int8CudaLinear(LinearOp):
    """y = x, quantised to int8, @ (codes * scales).T + bias; products are exact.

    codes    int8 [N, K], scales float32 [N], bias [N] or None
    x_scale  of all activations; None: one for each row
    dtype    of x and y
    """

    rounds_activations = True

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: float | None,
        dtype: torch.dtype,
        info: DeviceInfo,
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self.weight = ByteWeight(codes.view(torch.uint8), scales[:, None], None, self.in_features)
        self.bias = None if bias is None else bias.to(dtype)
        self.x_scale = None if x_scale is None else torch.tensor([x_scale], device=codes.device)
        self.dtype = dtype
        self.chip = chip_of(codes.device, info)
        self.native = self.chip.sm >= 80
        self.library = self.out_features % 8 == 0 and self.in_features % 8 == 0
        few = "Triton" if self.native else "Triton without int8 units"
        self.kernel = f"{few} W8A8 int8" + (f", cuBLAS int8 above {self.most_rows()} rows" if self.library else "")

    def most_rows(self) -> int:
        """Up to how many rows the Triton kernel runs."""
        if not self.library:
            return 1 << 62
        return DOT_ROWS if self.native else LIBRARY_ROWS - 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_rows(x, int8_encode, LARGEST, scale=self.x_scale)
        if x.shape[0] <= self.most_rows():
            return w8a8_matmul(
                codes, scales, self.weight, self.bias, self.dtype, int8_dot, native=self.native, chip=self.chip
            )
        y = torch._int_mm(codes.view(torch.int8), self.weight.codes.view(torch.int8).t()).to(torch.float32)
        y *= scales
        y *= self.weight.scales[:, 0]
        if self.bias is not None:
            y += self.bias
        return y.to(self.dtype)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {**self.weight.buffers(), "x_scale": self.x_scale, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}
