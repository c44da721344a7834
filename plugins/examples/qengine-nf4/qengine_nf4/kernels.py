"""NF4 on a GPU: qengine's 4-bit GEMM template, with a device function that looks values up."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from qengine.plugin import DeviceInfo, LinearOp
from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm import PackedWeight, pack_codes, wna16_matmul
from qengine_nf4.levels import unpack


@triton.jit
def unpack_level(words, SLOT: tl.constexpr):
    """int32 words -> float32 values of the codes in bits 4 * SLOT .. 4 * SLOT + 3, as `levels.LEVELS` has them."""
    c = (words >> (4 * SLOT)) & 0xF
    b0, b1, b2 = (c & 1) > 0, (c & 2) > 0, (c & 4) > 0
    low = tl.where(
        b2,
        tl.where(b1, tl.where(b0, 0.0, -0.09105003625154495), tl.where(b0, -0.18477343022823334, -0.28444138169288635)),
        tl.where(b1, tl.where(b0, -0.39491748809814453, -0.5250730514526367), tl.where(b0, -0.6961928009986877, -1.0)),
    )
    high = tl.where(
        b2,
        tl.where(b1, tl.where(b0, 1.0, 0.7229568362236023), tl.where(b0, 0.5626170039176941, 0.44070982933044434)),
        tl.where(b1, tl.where(b0, 0.33791524171829224, 0.24611230194568634),
                 tl.where(b0, 0.16093020141124725, 0.07958029955625534)),
    )  # fmt: skip
    return tl.where(c > 7, high, low)


class NF4CudaOp(LinearOp):
    """codes uint8 [N, ceil(K / 2)], scales float16 [N, groups], bias [N] or None; all on the device."""

    kernel = "Triton NF4 through the 4-bit template"

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        in_features: int,
        group: int,
        info: DeviceInfo,
    ) -> None:
        self.in_features, self.out_features = in_features, len(codes)
        self.weight = PackedWeight(
            words=pack_codes(unpack(codes, in_features).t().contiguous()),
            scales=scales.t().contiguous(),
            zeros=None,
            in_features=in_features,
            group_size=group,
            symmetric_zero=0,  # the values have their signs
        )
        self.bias = bias
        chip = Chip.of(codes.device)
        self.chip = replace(chip, sm=info.sm, shared_memory=info.shared_memory or chip.shared_memory)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return wna16_matmul(x, self.weight, self.bias, unpack_level, self.chip)

    def buffers(self) -> dict[str, torch.Tensor]:
        named = {"words": self.weight.words, "scales": self.weight.scales, "bias": self.bias}
        return {name: t for name, t in named.items() if t is not None}
