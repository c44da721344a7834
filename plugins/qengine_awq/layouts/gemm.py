"""AutoAWQ's gemm layout, which nearly every public AWQ model has; its bits are in `qengine_awq.layout`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine.plugin import LinearSpec, TensorInfo, TensorNeed
from qengine_awq.layouts.base import FLOATS, Layout, shaped


class Gemm(Layout):
    """qweight I32 [K, N / 8], qzeros I32 [G, N / 8], scales [G, N]."""

    name = "gemm"
    stated = ("gemm", "exllama", "ipex")  # the other two are kernels: their files hold this layout

    def fits(self, k: int, n: int, tensors: Mapping[str, TensorInfo]) -> bool:
        return (
            n % 8 == 0
            and shaped(tensors, "qweight", ("I32",), k, n // 8)
            and shaped(tensors, "qzeros", ("I32",), None, n // 8)
            and shaped(tensors, "scales", FLOATS, None, n)
        )

    def needs(self, spec: LinearSpec, group_size: int, zero_point: bool) -> list[TensorNeed]:
        k, n, groups = spec.in_features, spec.out_features, self.slots(spec.in_features, group_size)
        needs = [
            TensorNeed("qweight", (k, n // 8), ("I32",), output_dim=1, input_dim=0),
            TensorNeed("scales", (groups, n), FLOATS, output_dim=1, input_dim=0),
        ]
        if zero_point:
            needs.append(TensorNeed("qzeros", (groups, n // 8), ("I32",), output_dim=1, input_dim=0))
        return needs

    def to_gemm(
        self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], group_size: int
    ) -> dict[str, torch.Tensor]:
        return {leaf: tensors[leaf] for leaf in ("qweight", "scales", "qzeros") if leaf in tensors}
