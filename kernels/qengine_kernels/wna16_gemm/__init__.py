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

__all__ = [
    "SCRATCH_BYTES",
    "PackedWeight",
    "normal_group_size",
    "pack_codes",
    "packed_bytes",
    "unpack_words",
    "wna16_matmul",
]


def wna16_matmul(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    unpack: Any,
    chip: Chip | None = None,
    route: Route | None = None,
) -> torch.Tensor:
    """x [M, K] float16, bfloat16 (sm_80 up) or float32, bias [N] or None -> [M, N] in x's dtype, float32 accumulation.

    `unpack(words, SLOT)` is a Triton device function: int32 words -> the codes in slot SLOT (see `layout.py`).
    A few rows run as multiply-and-add with K split over programs, some hundreds through `tl.dot`, more by dequantising
    at most SCRATCH_BYTES of the weight at a time for a library GEMM; on sm_75, where `tl.dot` is plain FMA, the
    middle is left out. `chip` and `route` ("gemv", "gemm", "dequantize") override the choice, for tests.
    """
    from qengine_kernels.wna16_gemm.launcher import launch_wna16

    return launch_wna16(x, weight, bias, unpack, chip, route)
