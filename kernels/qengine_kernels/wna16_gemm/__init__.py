"""Linear layers over 2-, 4- or 8-bit weights with group scales and zeros: y = x @ ((code - zero) * scale) + bias."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.launch import Chip
from qengine_kernels.wna16_gemm.config import SCRATCH_BYTES, Route
from qengine_kernels.wna16_gemm.layout import (
    PackedWeight,
    normal_group_size,
    pack_codes,
    packed_bytes,
    unpack_words,
)
from qengine_kernels.wna16_gemm.tiles import TiledWeight, has_tiles, tiled_bytes, to_tiles

__all__ = [
    "SCRATCH_BYTES",
    "PackedWeight",
    "TiledWeight",
    "held_bytes",
    "held_weight",
    "normal_group_size",
    "pack_codes",
    "packed_bytes",
    "unpack_words",
    "wna16_matmul",
]


def held_weight(weight: PackedWeight, dtype: torch.dtype, chip: Chip) -> PackedWeight | TiledWeight:
    """The weight as the fastest kernels for x of `dtype` on `chip` take it: in tiles where its shape, its bits and the
    chip allow, else as it is."""
    shape = weight.in_features, weight.out_features, weight.group_size, weight.bits, weight.scales.element_size()
    return to_tiles(weight) if has_tiles(*shape, dtype, chip.tensor_cores) else weight


def held_bytes(
    in_features: int,
    out_features: int,
    group_size: int,
    zeros: bool,
    dtype: torch.dtype,
    chip: Chip,
    scale_bytes: int = 2,
    bits: int = 4,
    tiles: bool = True,
) -> int:
    """Bytes of `held_weight`, or of a `PackedWeight` without `tiles`; group_size as `normal_group_size` gives it."""
    if tiles and has_tiles(in_features, out_features, group_size, bits, scale_bytes, dtype, chip.tensor_cores):
        return tiled_bytes(in_features, out_features, group_size)
    return packed_bytes(in_features, out_features, group_size, zeros, scale_bytes, bits)


def wna16_matmul(
    x: torch.Tensor,
    weight: PackedWeight | TiledWeight,
    bias: torch.Tensor | None,
    unpack: Any,
    chip: Chip | None = None,
    route: Route | None = None,
) -> torch.Tensor:
    """x [M, K] float16, bfloat16 (sm_80 up) or float32, bias [N] or None -> [M, N] in x's dtype, float32 accumulation.

    `unpack(words, SLOT)` is a Triton device function: int32 words -> the codes in slot SLOT (see `layout.py`).
    Other kernels run where the weight is in tiles: those know their codes, and `unpack` is not asked.
    A few rows run as multiply-and-add with K split over programs, some hundreds through `tl.dot`, more by dequantising
    at most SCRATCH_BYTES of the weight at a time for a library GEMM; on sm_75, where `tl.dot` is plain FMA, the
    middle is left out. `chip` and `route` ("gemv", "gemm", "dequantize") override the choice, for tests.
    """
    from qengine_kernels.wna16_gemm.launcher import launch_wna16

    return launch_wna16(x, weight, bias, unpack, chip, route)
