"""A dense linear on a CPU with an 8-bit copy for few rows: for an output layer, of which a decode step asks one row.

One row costs the reading of the weight, so half the bytes take half the time. The copy has one scale for each output
channel and rounds weights only: activations stay bfloat16, sums are float32. Its error, about 0.4 % of a result, is
that of rounding a result to bfloat16. Larger batches are bound by arithmetic and run on the dense weight.
"""

from __future__ import annotations

import torch

from qengine_kernels.cpu_linear.dense import DenseCpuLinear, Way, dense_bytes

CHUNK = 4096
"""Rows rounded at a time: bounds the float32 copy."""
LARGEST = 127
WIDTH = 32
"""Inputs must come in multiples of this: torch's kernel reads whole vectors, past the end of an odd row (torch 2.13 is
wrong for 33 and 40 inputs)."""


def int8_available() -> bool:
    return hasattr(torch, "_weight_int8pack_mm")


def runs_few_rows(in_features: int, dtype: torch.dtype, limit: int) -> bool:
    """Whether FewRowsCpuLinear keeps a copy: with other activations torch's kernel is ten times slower."""
    return dtype is torch.bfloat16 and limit > 0 and in_features % WIDTH == 0


def few_rows_bytes(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype, *, limit: int, preferred: Way
) -> int:
    """Bytes that FewRowsCpuLinear keeps; `limit` and `preferred` as there."""
    dense = dense_bytes(out_features, in_features, bias, dtype, preferred)
    if not runs_few_rows(in_features, dtype, limit):
        return dense
    return dense + out_features * (in_features + 2) + (out_features * dtype.itemsize if bias else 0)


def round_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (codes int8 [N, K], scales bfloat16 [N]): weight is about codes * scales[:, None]."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.bfloat16)
    for i in range(0, len(weight), CHUNK):
        part = weight[i : i + CHUNK].float()
        scale = (part.abs().amax(1) / LARGEST).clamp_(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        scales[i : i + CHUNK] = scale
        codes[i : i + CHUNK] = (part / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes, scales


class FewRowsCpuLinear:
    """y = x @ weight.T + bias: by an 8-bit copy up to `limit` rows (`tuning().int8_limit`), exactly above.

    weight [N, K] of any float dtype, bias [N] or None; x [M, K] and y [M, N] are of `dtype`, `preferred` is the bf16
    way of the exact product. With another `dtype` than bfloat16, `limit` 0, or K no multiple of 32, there
    is no copy.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, limit: int, preferred: Way
    ) -> None:
        self.limit = limit if runs_few_rows(weight.shape[1], dtype, limit) else 0
        self.bias: torch.Tensor | None = None
        if self.limit:
            self.codes, self.scales = round_channels(weight)
            self.bias = None if bias is None else bias.to(dtype).contiguous()
        self.dense = DenseCpuLinear(weight, bias, dtype, preferred)
        self.out_features, self.in_features = self.dense.out_features, self.dense.in_features
        self.kernel = self.dense.kernel
        if self.limit:
            self.kernel = f"int8 copy per channel for up to {limit} rows on CPU, {self.kernel} above (measured)"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        if x.shape[0] > self.limit:
            return self.dense(x)
        y = torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)
        return y if self.bias is None else y + self.bias

    def buffers(self) -> dict[str, torch.Tensor]:
        out = {f"dense.{k}": t for k, t in self.dense.buffers().items()}
        if self.limit:
            out |= {"codes": self.codes, "scales": self.scales}
        if self.bias is not None:
            out["bias"] = self.bias
        return out
