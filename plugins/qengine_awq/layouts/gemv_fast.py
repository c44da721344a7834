"""AutoAWQ's gemv_fast and MIT's llm-awq layout (FORMAT: AutoAWQ 0.2.9, modules/linear/gemv_fast.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine.plugin import LinearSpec, TensorInfo, TensorNeed
from qengine_awq.layout import SYMMETRIC_ZERO, pack
from qengine_awq.layouts import padded
from qengine_awq.layouts.base import FLOATS, Layout, groups_of, shaped

RUN = torch.arange(32).view(4, 4, 2).permute(1, 0, 2).reshape(4, 4, 2).permute(0, 2, 1).flatten().tolist()
"""Within each run of 32 inputs of a row, the input that every stored position holds."""


HALF_EPS, TINY = torch.finfo(torch.float16).eps, 2.0**-24
"""The writer rounds zeros to float16: so much of their value, or of the smallest numbers at most."""


class GemvFast(Layout):
    """qweight I16 [N / 4, K]; scales and zeros [8 W, N], the zeros as -(scale * zero): W[n, k] = q * s + z.

    Of four rows and 64 inputs, int16 number j holds elements 4 j .. 4 j + 3 of the flattened [4, 64] in its nibbles,
    each run of 32 inputs in the order RUN. W is `padded.words`.
    """

    name = "gemv_fast"
    stated = ("gemv_fast", "llm-awq")
    guesses = padded.GUESSES
    zeros = "qzeros"

    def fits(self, k: int, n: int, tensors: Mapping[str, TensorInfo]) -> bool:
        return (
            n % 8 == 0
            and k % 64 == 0
            and {"qzeros", "scaled_zeros"} & tensors.keys() <= {self.zeros}
            and shaped(tensors, "qweight", ("I16",), n // 4, k)
            and shaped(tensors, self.zeros, FLOATS, None, n)
            and shaped(tensors, "scales", FLOATS, None, n)
        )

    def needs(self, spec: LinearSpec, group_size: int, zero_point: bool) -> list[TensorNeed]:
        k, n, slots = spec.in_features, spec.out_features, self.slots(spec.in_features, group_size)
        needs = [
            TensorNeed("qweight", (n // 4, k), ("I16",), output_dim=0, input_dim=1),
            TensorNeed("scales", (slots, n), FLOATS, output_dim=1, input_dim=0),
        ]
        if zero_point:
            needs.append(TensorNeed(self.zeros, (slots, n), FLOATS, output_dim=1, input_dim=0))
        return needs

    def slots(self, k: int, group_size: int) -> int:
        return 8 * padded.words(k, group_size)

    def zeros_in(self, tensors: Mapping[str, TensorInfo]) -> bool:
        return self.zeros in tensors

    def to_gemm(
        self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], group_size: int
    ) -> dict[str, torch.Tensor]:
        groups = groups_of(spec.in_features, group_size)
        padded.check("scales", tensors["scales"], groups)
        scales = tensors["scales"][:groups].contiguous()
        out = {"qweight": pack(codes(tensors["qweight"]).t()), "scales": scales}
        if self.zeros in tensors:
            out["qzeros"] = pack(whole_zeros(self.zeros, tensors[self.zeros][:groups], scales))
        return out


class LlmAwq(GemvFast):
    """The same with its zeros under another name."""

    name = "llm-awq"
    zeros = "scaled_zeros"


def codes(words: torch.Tensor) -> torch.Tensor:
    """int16 [N / 4, K] -> uint8 [N, K]."""
    nibbles = torch.stack([((words >> (4 * i)) & 15).to(torch.uint8) for i in range(4)], dim=-1)
    strips, k = words.shape
    rows = nibbles.view(strips, k // 64, 4, 64).transpose(1, 2).reshape(strips * 4, k // 32, 32)
    out = torch.empty_like(rows)
    out[..., RUN] = rows
    return out.view(strips * 4, k)


def whole_zeros(leaf: str, scaled: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The zeros 0..15 of -(scale * zero), which was rounded to 16 bits: uint8 [G, N].

    Raises ValueError where no zero in 0..15 gives the stored value.
    """
    s, z = scales.float(), scaled.float()
    found = torch.where(s == 0, float(SYMMETRIC_ZERO), (-z / s).round())
    rounding = z.abs() * max(torch.finfo(scaled.dtype).eps, HALF_EPS) + TINY
    off = (z + torch.where(s == 0, 0.0, found * s)).abs() > rounding
    wrong = int((off | (found < 0) | (found > 15)).sum())
    if wrong:
        raise ValueError(f"{leaf}: {wrong} of {z.numel()} values are no zero point 0..15 times the scale, negated")
    return found.to(torch.uint8)
