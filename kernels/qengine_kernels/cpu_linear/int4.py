"""4-bit weights on a CPU through torch's int4 GEMM, with a dense copy for large batches.

torch's kernel computes w = (q - 8) * scale + zero in float32 from unsigned codes q, with bf16 scale and zero, bf16
activations and float32 accumulation. It reads a quarter of bf16's bytes and wins while the GEMM is bound by memory,
but its time grows with the batch; above `limit` rows the dense copy runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qengine_kernels.cpu_linear.dense import DenseCpuLinear, Way, dense_bytes, kept_dtype, round_up
from qengine_kernels.cpu_linear.reference import dequantize

GROUPS = (256, 128, 64, 32)
ROWS = 16
"""Rows must come in multiples of this; they are padded."""
BLOCK = 64
"""Rows that the packer lays out together on some CPUs: parts of a weight are multiples of it."""
AT_ONCE = 1 << 18
"""Codes packed at a time: the packer wants int32, eight times the bytes of the result."""


def int4_available() -> bool:
    return hasattr(torch, "_convert_weight_to_int4pack_for_cpu") and hasattr(torch, "_weight_int4pack_mm_for_cpu")


def int4_group(in_features: int, group_size: int) -> int | None:
    """The kernel's group for weights of this group size (-1: one group), or None when it has no fitting one.

    Any kernel group that divides both works, with the scales repeated; the largest is taken. A ragged last group is
    fine as long as the input width itself divides.
    """
    if not int4_available():
        return None
    group = in_features if group_size == -1 else group_size
    return next((g for g in GROUPS if group % g == 0 and in_features % g == 0), None)


def used_group(in_features: int, group_size: int, dtype: torch.dtype, limit: int, keep_dense: bool) -> int | None:
    """The kernel group that Int4CpuLinear packs for; None where it keeps dequantised weights only: other dtypes than
    bfloat16, unknown groups, and a dense copy that is faster for every M (`limit` 0)."""
    if dtype is not torch.bfloat16 or (limit < 1 and keep_dense):
        return None
    return int4_group(in_features, group_size)


def int4_bytes(
    out_features: int,
    in_features: int,
    group_size: int,
    bias: bool,
    dtype: torch.dtype,
    *,
    limit: int,
    preferred: Way,
    keep_dense: bool = True,
) -> int:
    """Bytes that Int4CpuLinear keeps; `limit` and `preferred` as there."""
    group = used_group(in_features, group_size, dtype, limit, keep_dense)
    if group is None:
        return dense_bytes(out_features, in_features, bias, dtype, preferred)
    rows = round_up(out_features, ROWS)
    packed = rows * in_features // 2 + (in_features // group) * rows * 2 * 2
    dense = dense_bytes(out_features, in_features, False, dtype, preferred) if keep_dense else 0
    return packed + dense + (out_features * dtype.itemsize if bias else 0)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """codes [N, K] 0..15 of any integer dtype, N % 16 == 0 -> torch's packed uint8 [N, K / 2]."""
    rows, in_features = codes.shape
    out = torch.empty(rows, in_features // 2, dtype=torch.uint8)
    step = max(1, AT_ONCE // (BLOCK * in_features)) * BLOCK
    for packed, part in zip(out.split(step), codes.split(step), strict=True):
        packed.copy_(torch._convert_weight_to_int4pack_for_cpu(part.to(torch.int32).contiguous(), 1))
    return out


class Int4CpuLinear:
    """y = x @ ((codes - zeros) * scales).T + bias for 4-bit codes.

    codes [N, K] unsigned 0..15 (uint8 or int32), scales and zeros [N, G] (zeros in codes; floats are fine), group
    size in inputs or -1, the last group may be short; bias [N] or None. Activations and results are of `dtype`.

    With `dtype` bfloat16 the int4 kernel runs up to `limit` rows (`tuning().int4_limit`) and a dense copy above it
    (`keep_dense` False: int4 always, fewer bytes, slower on large batches). Any other dtype, or a group size the kernel
    does not know, keeps only dequantised weights; float32 is then exact. `kernel` says which.
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
        limit: int,
        preferred: Way,
        keep_dense: bool = True,
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self.dtype = dtype
        self.group = used_group(self.in_features, group_size, dtype, limit, keep_dense)
        self.packed: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.dense: DenseCpuLinear | None = None
        self.limit = 0
        if self.group is None or keep_dense:
            weight = dequantize(codes, scales, zeros, group_size, kept_dtype(self.in_features, dtype, preferred))
            dense_bias = bias if self.group is None else None
            self.dense = DenseCpuLinear(weight, dense_bias, dtype, preferred)
            del weight
        if self.group is None:
            why = f"int4 needs bfloat16 and groups of {GROUPS}" if limit else "faster than int4 for every M, measured"
            assert self.dense is not None
            self.kernel = f"dequantised {self.dense.kernel} ({why})"
            return
        self._pack(codes, scales, zeros, group_size)
        self.bias = None if bias is None else bias.to(dtype).contiguous()
        self.limit = limit if self.dense is not None else 1 << 62
        above = "" if self.dense is None else f" up to M={limit}, {self.dense.kernel} above (measured)"
        self.kernel = "int4" + (above or " for every M (no dense copy kept)")

    def _pack(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int) -> None:
        assert self.group is not None
        extra = round_up(self.out_features, ROWS) - self.out_features
        self.narrow = extra > 0
        self.packed = pack_codes(F.pad(codes, (0, 0, 0, extra)))
        own = self.in_features if group_size == -1 else group_size
        index = torch.arange(0, self.in_features, self.group) // own
        scale = scales[:, index].to(torch.bfloat16)
        # the zero belongs to the rounded scale: code == zero then dequantises to almost nothing, as it should
        zero = ((8.0 - zeros[:, index].float()) * scale.float()).to(torch.bfloat16)
        pairs = torch.stack([scale, zero], dim=-1)
        self.scales_and_zeros = F.pad(pairs, (0, 0, 0, 0, 0, extra)).transpose(0, 1).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        if x.shape[0] > self.limit:
            assert self.dense is not None
            y = self.dense(x)
        else:
            assert self.packed is not None and self.group is not None
            y = torch._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, self.group, self.scales_and_zeros)
            if self.narrow:
                y = y[:, : self.out_features]
        return y if self.bias is None else y + self.bias

    def buffers(self) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = {}
        if self.packed is not None:
            out |= {"packed": self.packed, "scales_and_zeros": self.scales_and_zeros}
        if self.dense is not None:
            out |= {f"dense.{k}": t for k, t in self.dense.buffers().items()}
        if self.bias is not None:
            out["bias"] = self.bias
        return out
