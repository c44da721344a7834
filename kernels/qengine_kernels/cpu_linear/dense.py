"""A dense linear on a CPU, by the fastest GEMM that this machine has for the compute dtype.

float32 is exact: weights are float32 and so is the product. For bfloat16 there are three ways: oneDNN with the weight
reordered once ("packed": fastest with AVX-512 BF16 or AMX), torch's own bf16 linear ("plain"), and float32 weights
with converted activations ("float32": fastest on CPUs without bf16 instructions, at twice the bytes).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Way = Literal["packed", "plain", "float32"]

PACK = 64
"""oneDNN reorders weights in tiles of up to 64 x 64; rows are padded to that here, so that bytes are known ahead."""

NAMES: dict[Way, str] = {
    "packed": "prepacked bf16 GEMM",
    "plain": "GEMM",
    "float32": "float32 GEMM",
}


def packed_available() -> bool:
    """oneDNN's prepacked bf16 linear exists in this torch and runs on this CPU."""
    ops = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(ops, n) for n in names)
        and bool(ops._is_mkldnn_bf16_supported())
    )


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def way_for(in_features: int, dtype: torch.dtype, preferred: Way) -> Way:
    """The way this shape really takes: bf16 follows `preferred` where the shape allows, other dtypes are plain."""
    if dtype is not torch.bfloat16:
        return "plain"
    if preferred == "packed" and in_features % PACK:
        return "plain"
    return preferred


def kept_dtype(in_features: int, dtype: torch.dtype, preferred: Way) -> torch.dtype:
    """What DenseCpuLinear rounds its weight to."""
    return torch.float32 if way_for(in_features, dtype, preferred) == "float32" else dtype


def dense_bytes(out_features: int, in_features: int, bias: bool, dtype: torch.dtype, preferred: Way) -> int:
    """Bytes that DenseCpuLinear keeps."""
    way = way_for(in_features, dtype, preferred)
    rows = round_up(out_features, PACK) if way == "packed" else out_features
    kept = kept_dtype(in_features, dtype, preferred)
    bias_bytes = rows * dtype.itemsize if way == "packed" else out_features * kept.itemsize
    return rows * in_features * kept.itemsize + (bias_bytes if bias else 0)


def pack_rows(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] -> oneDNN's blocked bf16 weight of round_up(N, 64) rows (an opaque tensor: no data_ptr)."""
    extra = round_up(weight.shape[0], PACK) - weight.shape[0]
    padded = F.pad(weight, (0, 0, 0, extra)) if extra else weight.contiguous()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(padded.to(torch.bfloat16), None)
    return packed


class DenseCpuLinear:
    """y = x @ weight.T + bias.

    weight [N, K] of any float dtype, bias [N] or None; x [M, K] and y [M, N] are of `dtype`. `preferred` is the bf16
    way (see `tuning().dense`).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, preferred: Way) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.way = way_for(self.in_features, dtype, preferred)
        self.narrow = False
        if self.way == "packed":
            self.weight = pack_rows(weight)
            self.narrow = self.weight.shape[0] != self.out_features
            extra = self.weight.shape[0] - self.out_features
            self.bias = None if bias is None else F.pad(bias.to(dtype), (0, extra)).contiguous()
        else:
            kept = kept_dtype(self.in_features, dtype, preferred)
            self.weight = weight.to(kept).contiguous()
            self.bias = None if bias is None else bias.to(kept).contiguous()
        prefix = f"{str(dtype).removeprefix('torch.')} " if self.way == "plain" else ""
        self.kernel = prefix + NAMES[self.way]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        if self.way == "packed":
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.weight, self.bias, "none", [], "")
            return y[:, : self.out_features] if self.narrow else y
        if self.way == "float32":
            return F.linear(x.to(torch.float32), self.weight, self.bias).to(self.dtype)
        return F.linear(x, self.weight, self.bias)

    def buffers(self) -> dict[str, torch.Tensor]:
        """What is kept. A packed weight is opaque: it has a size and an element size, but no storage to look at."""
        out = {"weight": self.weight}
        if self.bias is not None:
            out["bias"] = self.bias
        return out
