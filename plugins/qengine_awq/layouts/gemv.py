"""AutoAWQ's gemv layout (FORMAT: AutoAWQ 0.2.9, modules/linear/gemv.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine.plugin import LinearSpec, TensorInfo, TensorNeed
from qengine_awq.layout import pack
from qengine_awq.layouts import padded
from qengine_awq.layouts.base import FLOATS, Layout, groups_of, shaped


class Gemv(Layout):
    """qweight I32 [N, K / 8] and qzeros I32 [N, W], codes in order from the low bits up; scales [N, 8 W].

    W is `padded.words`. Stored zeros are the real ones.
    """

    name = "gemv"
    stated = ("gemv",)
    group_dim = 1
    guesses = padded.GUESSES

    def fits(self, k: int, n: int, tensors: Mapping[str, TensorInfo]) -> bool:
        return (
            n % 8 == 0
            and k % 8 == 0
            and shaped(tensors, "qweight", ("I32",), n, k // 8)
            and shaped(tensors, "qzeros", ("I32",), n, None)
            and shaped(tensors, "scales", FLOATS, n, None)
        )

    def needs(self, spec: LinearSpec, group_size: int, zero_point: bool) -> list[TensorNeed]:
        k, n, slots = spec.in_features, spec.out_features, self.slots(spec.in_features, group_size)
        needs = [
            TensorNeed("qweight", (n, k // 8), ("I32",), output_dim=0, input_dim=1),
            TensorNeed("scales", (n, slots), FLOATS, output_dim=0, input_dim=1),
        ]
        if zero_point:
            needs.append(TensorNeed("qzeros", (n, slots // 8), ("I32",), output_dim=0, input_dim=1))
        return needs

    def slots(self, k: int, group_size: int) -> int:
        return 8 * padded.words(k, group_size)

    def to_gemm(
        self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], group_size: int
    ) -> dict[str, torch.Tensor]:
        groups = groups_of(spec.in_features, group_size)
        scales = tensors["scales"].t()
        padded.check("scales", scales, groups)
        out = {"qweight": pack(in_order(tensors["qweight"]).t()), "scales": scales[:groups].contiguous()}
        if "qzeros" in tensors:
            out["qzeros"] = pack(in_order(tensors["qzeros"]).t()[:groups])
        return out


def in_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8 C], from the low bits up."""
    nibbles = [((words >> (4 * i)) & 15).to(torch.uint8) for i in range(8)]
    return torch.stack(nibbles, dim=-1).flatten(1)
