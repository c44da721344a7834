"""8-bit group-quantised weights on a CPU: a dense copy, or one byte a weight as two 4-bit halves.

torch has no 8-bit GEMM with group scales, but code = 16 * high + low, so two int4 products (see `int4`) give exactly
(code - zero) * scale. For one row of x that is as fast as torch's per-channel int8 GEMM; on many rows it costs twice
int4's time, and the dense copy wins.
"""

from __future__ import annotations

import functools

import torch

from qengine_kernels.cpu_linear.dense import DenseCpuLinear, Way, dense_bytes, kept_dtype
from qengine_kernels.cpu_linear.int4 import Int4CpuLinear, int4_bytes, used_group
from qengine_kernels.cpu_linear.reference import dequantize

ALWAYS = 1
"""Any positive limit: the halves run for every number of rows."""


def int8_bytes(
    out_features: int,
    in_features: int,
    group_size: int,
    bias: bool,
    dtype: torch.dtype,
    *,
    preferred: Way,
    keep_dense: bool = True,
) -> int:
    """Bytes that Int8CpuLinear keeps; `preferred` and `keep_dense` as there."""
    if not runs_in_halves(in_features, group_size, dtype, keep_dense):
        return dense_bytes(out_features, in_features, bias, dtype, preferred)

    def half(bias: bool) -> int:
        return int4_bytes(
            out_features, in_features, group_size, bias, dtype, limit=ALWAYS, preferred=preferred, keep_dense=False
        )

    return half(bias) + half(False)


def runs_in_halves(in_features: int, group_size: int, dtype: torch.dtype, keep_dense: bool) -> bool:
    """Whether Int8CpuLinear keeps the two halves rather than dequantised weights."""
    return not keep_dense and used_group(in_features, group_size, dtype, ALWAYS, False) is not None


class Int8CpuLinear:
    """y = x @ ((codes - zeros) * scales).T + bias for 8-bit codes.

    codes uint8 [N, K], scales and zeros [N, G] (zeros in codes; floats are fine), group size in inputs or -1, the last
    group may be short; bias [N] or None. Activations and results are of `dtype`.

    `keep_dense` True keeps dequantised weights only; False keeps one byte a weight where `dtype` is bfloat16 and the
    int4 kernel knows the group size. `kernel` says which.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        group_size: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        preferred: Way,
        keep_dense: bool = True,
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self.dense: DenseCpuLinear | None = None
        self.halves: list[Int4CpuLinear] = []
        if not runs_in_halves(self.in_features, group_size, dtype, keep_dense):
            weight = dequantize(codes, scales, zeros, group_size, kept_dtype(self.in_features, dtype, preferred))
            self.dense = DenseCpuLinear(weight, bias, dtype, preferred)
            self.kernel = f"8-bit dequantised to {self.dense.kernel}"
            return
        scales, zeros = scales.float(), zeros.float()
        # (high - (zero - 8) / 16) * 16 + (low - 8): the low half has no mean of its own to cancel
        made = functools.partial(Int4CpuLinear, limit=ALWAYS, preferred=preferred, keep_dense=False)
        self.halves = [
            made(codes >> 4, scales * 16, (zeros - 8) / 16, group_size, bias, dtype),
            made(codes & 15, scales, torch.full_like(zeros, 8.0), group_size, None, dtype),
        ]
        self.kernel = "8-bit as two int4 halves for every M (no dense copy kept)"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        if self.dense is not None:
            return self.dense(x)
        high, low = self.halves
        return high(x) + low(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        if self.dense is not None:
            return self.dense.buffers()
        named = zip(("high", "low"), self.halves, strict=True)
        return {f"{name}.{key}": t for name, half in named for key, t in half.buffers().items()}
