"""The layout that AutoAWQ's `version: "marlin"` stores (FORMAT: AutoAWQ 0.2.9, modules/linear/marlin.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qengine.plugin import LinearSpec, TensorInfo, TensorNeed
from qengine_awq.layout import ORDER, pack
from qengine_awq.layouts.base import FLOATS, Layout, shaped
from qengine_awq.layouts.gemv import in_order

ONE_GROUP = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
"""Without groups, the column within 32 that every stored scale belongs to."""


class Marlin(Layout):
    """qweight I32 [K / 16, 2 N], scales [G, N] in another order of columns, no zeros: every zero is 8.

    The inputs are cut into tiles of 16 and these into chunks of 64 columns, 1024 codes each, see `PLACES`.
    """

    name = "marlin"
    stated = ("marlin",)
    may_have_zeros = False

    def fits(self, k: int, n: int, tensors: Mapping[str, TensorInfo]) -> bool:
        return (
            n % 64 == 0
            and k % 16 == 0
            and "qzeros" not in tensors
            and shaped(tensors, "qweight", ("I32",), k // 16, 2 * n)
            and shaped(tensors, "scales", FLOATS, None, n)
        )

    def needs(self, spec: LinearSpec, group_size: int, zero_point: bool) -> list[TensorNeed]:
        k, n, groups = spec.in_features, spec.out_features, self.slots(spec.in_features, group_size)
        return [
            TensorNeed("qweight", (k // 16, 2 * n), ("I32",), output_dim=1, input_dim=0),
            TensorNeed("scales", (groups, n), FLOATS, output_dim=1, input_dim=0),
        ]

    def to_gemm(
        self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], group_size: int
    ) -> dict[str, torch.Tensor]:
        k, n = spec.in_features, spec.out_features
        stored = in_order(tensors["qweight"]).view(k // 16, n // 64, 1024)
        tiles = torch.empty_like(stored)
        tiles[..., PLACES] = stored
        rows = tiles.view(k // 16, n // 64, 16, 64).transpose(1, 2).reshape(k, n)
        return {"qweight": pack(rows), "scales": columns_in_order(tensors["scales"])}


def places() -> list[int]:
    """For every slot of 1024 codes, where in the tile [16 inputs, 64 columns] its code belongs."""
    out = []
    for t in range(32):
        for j in range(4):
            for o in ORDER:
                row = 2 * (t % 4) + o % 2 + 8 * (o % 4 // 2)
                out.append(64 * row + 16 * j + t // 4 + 8 * (o // 4))
    return out


PLACES = places()


def columns_in_order(scales: torch.Tensor) -> torch.Tensor:
    """Undo the order of scales' columns: an 8 x 8 transpose of every 64 with groups, ONE_GROUP of every 32 without."""
    groups, n = scales.shape
    if groups > 1:
        return scales.view(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n)
    stored = scales.view(n // 32, 32)
    out = torch.empty_like(stored)
    out[:, ONE_GROUP] = stored
    return out.view(1, n)
