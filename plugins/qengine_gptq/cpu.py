"""GPTQ on a CPU: int4 kernels for 2, 3 and 4 bits, dense weights or two int4 halves for 8."""

from __future__ import annotations

import torch

from qengine.plugin import LinearOp
from qengine_gptq.shards import Decoded
from qengine_kernels.cpu_linear import (
    DenseCpuLinear,
    Int4CpuLinear,
    Int8CpuLinear,
    dense_bytes,
    int4_bytes,
    int8_bytes,
    kept_dtype,
    tuning,
    used_group,
)


def runs_packed(bits: int, in_features: int, group_size: int, dtype: torch.dtype, keep_dense: bool) -> bool:
    """Whether codes are kept; else only dequantised weights are, and those need no sorting of the inputs."""
    if bits == 8:
        return not keep_dense and used_group(in_features, group_size, dtype, 1, False) is not None
    return used_group(in_features, group_size, dtype, tuning().int4_limit, keep_dense) is not None


def cpu_bytes(
    bits: int,
    out_features: int,
    in_features: int,
    group_size: int,
    bias: bool,
    dtype: torch.dtype,
    *,
    ordered: bool,
    keep_dense: bool,
) -> int:
    """Bytes that `bind_cpu` keeps; `ordered`: the inputs are permuted."""
    t = tuning()
    if not runs_packed(bits, in_features, group_size, dtype, keep_dense):
        return dense_bytes(out_features, in_features, bias, dtype, t.dense)
    order = 4 * in_features if ordered else 0
    shape = (out_features, in_features, group_size, bias, dtype)
    if bits == 8:
        return order + int8_bytes(*shape, preferred=t.dense, keep_dense=keep_dense)
    return order + int4_bytes(*shape, limit=t.int4_limit, preferred=t.dense, keep_dense=keep_dense)


class GptqCpuOp(LinearOp):
    """A linear of `qengine_kernels.cpu_linear` behind the permutation of its inputs, if there is one."""

    def __init__(
        self, linear: DenseCpuLinear | Int4CpuLinear | Int8CpuLinear, order: torch.Tensor | None, kernel: str
    ) -> None:
        self.linear = linear
        self.order = order
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = kernel if order is None else f"{kernel}, inputs sorted by group"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.order is None else x.index_select(1, self.order))

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.linear.buffers() | ({} if self.order is None else {"order": self.order})


def bind_cpu(
    part: Decoded, bias: torch.Tensor | None, dtype: torch.dtype, *, keep_dense: bool
) -> GptqCpuOp:
    """One op over the outputs of `part`."""
    bits = part.bits
    t = tuning()
    if not runs_packed(bits, part.in_features, part.group_size, dtype, keep_dense):
        weight = part.dense(kept_dtype(part.in_features, dtype, t.dense))
        dense = DenseCpuLinear(weight, bias, dtype, t.dense)
        return GptqCpuOp(dense, None, f"{bits}-bit dequantised at load, {dense.kernel}")
    codes = part.codes.t().contiguous()
    scales, zeros = part.scales.t().float(), part.zeros_or_middle().t().float()
    if bits == 8:
        halves = Int8CpuLinear(
            codes, scales, zeros, part.group_size, bias, dtype, preferred=t.dense, keep_dense=keep_dense
        )
        return GptqCpuOp(halves, part.order, halves.kernel)
    held = "" if bits == 4 else f"{bits}-bit codes held in 4 bits: "
    # The kernel adds zeros in bfloat16 that it takes from 8: codes around 8 keep them small, a middle zero exact.
    middle = 8 - (1 << (bits - 1))
    packed = Int4CpuLinear(
        codes + middle if middle else codes, scales, zeros + middle, part.group_size, bias, dtype,
        limit=t.int4_limit, preferred=t.dense, keep_dense=keep_dense,
    )  # fmt: skip
    return GptqCpuOp(packed, part.order, held + packed.kernel)
