"""NF4 on a CPU: decoded once at load, or, where memory is short, for each call."""

from __future__ import annotations

import torch

from qengine.plugin import LinearOp
from qengine_kernels.cpu_linear import DenseCpuLinear, tuning
from qengine_nf4.levels import dequantize

DECODED_AT_ONCE = 1 << 22
"""Weights that a call decodes at a time: 16 MiB of float32."""


class DenseNF4(LinearOp):
    """The decoded weight through the fastest dense GEMM of this CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.linear = DenseCpuLinear(weight, bias, dtype, tuning().dense)
        self.in_features, self.out_features = self.linear.in_features, self.linear.out_features
        self.kernel = f"nf4 decoded at load, {self.linear.kernel}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers()


class PackedNF4(LinearOp):
    """codes uint8 [N, ceil(K / 2)], scales float16 [N, groups], bias [N] or None."""

    kernel = "nf4 decoded for each call, float32 GEMM"

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, in_features: int, group: int
    ) -> None:
        self.codes, self.scales, self.bias, self.group = codes, scales, bias, group
        self.in_features, self.out_features = in_features, len(codes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = max(1, DECODED_AT_ONCE // self.in_features)
        parts = zip(self.codes.split(rows), self.scales.split(rows), strict=True)
        wide = x.float()
        y = torch.cat([wide @ dequantize(c, s, self.in_features, self.group).t() for c, s in parts], dim=1)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes, "scales": self.scales} | ({} if self.bias is None else {"bias": self.bias})
