"""e4m3 weights on a GPU: native FP8 GEMMs, or weight-only ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine_kernels.fp8.device import e4m3_decode_finite, e4m3_dot, e4m3_encode
from qengine_kernels.fp8_linear.weight import E4M3, LARGEST, NATIVE_SM, native_reason
from qengine_kernels.launch import Chip
from qengine_kernels.quantize_rows import quantize_rows
from qengine_kernels.w8a8_gemm import w8a8_matmul
from qengine_kernels.w8a8_gemm.few_rows import takes_few_rows
from qengine_kernels.w8a16_gemm import ByteWeight, w8a16_matmul

LIBRARY_MULTIPLE = 16
"""torch._scaled_mm takes sizes in multiples of this."""


@functools.cache
def library_gemm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies e4m3 with a scale a row on this GPU into `dtype`: tried once on a small product.

    Which GPUs and result dtypes it takes has changed from version to version.
    """
    a = torch.ones((16, 32), device=device).to(E4M3)
    scales = torch.full((16, 1), 0.5, device=device), torch.full((1, 32), 0.25, device=device)
    b = torch.ones((32, 32), device=device).to(E4M3)
    bias = torch.ones(32, dtype=dtype, device=device)
    try:
        y = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], bias=bias, out_dtype=dtype)
    except (RuntimeError, ValueError):
        return False
    return bool((y == 5.0).all())


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows of the weight (`rows` None: all) that take their activations with the same static scale (None:
    dynamic)."""

    rows: slice | None
    input_scale: torch.Tensor | None

    def part(self, weight: ByteWeight, bias: torch.Tensor | None) -> tuple[ByteWeight, torch.Tensor | None]:
        """These rows of both. Cut for each call, because a view that is kept would outlive moved memory."""
        if self.rows is None:
            return weight, bias
        scales = weight.scales[self.rows] if weight.rows is None else weight.scales
        names = None if weight.rows is None else weight.rows[self.rows]
        own = ByteWeight(weight.codes[self.rows], scales, names, weight.block_k)
        return own, None if bias is None else bias[self.rows]


class Fp8CudaLinear:
    """y = x @ W.T + bias for x [M, K] and y [M, N] of `dtype`.

    weight        on the device where the op runs
    input_scales  (outputs, scale [] or [1]) of each stacked module, or None: activations are scaled by what they hold.
                  Modules with different static scales run one after the other, each with its own
    chip          picks the kernels
    native        None: where `native_reason` has nothing against it. False forces weight-only; True forces rounded
                  activations, emulated where the chip has no FP8 matrix units (for tests)
    """

    def __init__(
        self,
        weight: ByteWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        chip: Chip,
        *,
        input_scales: Sequence[tuple[int, torch.Tensor]] | None = None,
        native: bool | None = None,
    ) -> None:
        self.weight, self.chip, self.dtype = weight, chip, dtype
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.bias = None if bias is None else bias.to(dtype)
        reason = native_reason(chip.sm, dtype)
        self.native = reason is None if native is None else native
        self.units = chip.sm >= NATIVE_SM
        self.segments: list[Segment] = []
        if not self.native:
            self.kernel = f"weight-only FP8: Triton W8A16 ({reason or 'asked for'})"
            return
        self.segments = self._cut(input_scales)
        library = self.units and library_gemm(weight.codes.device, dtype)
        self.library = library and all(fits_library(s.part(weight, None)[0]) for s in self.segments)
        how = "per token and block" if weight.blocked else "per token"
        how = "with the checkpoint's scale" if input_scales else how
        by = "Triton for few rows, cuBLAS above" if self.library else "Triton"
        self.kernel = f"FP8 GEMM, activations rounded {how} ({by})"

    def _cut(self, input_scales: Sequence[tuple[int, torch.Tensor]] | None) -> list[Segment]:
        if input_scales is None:
            return [Segment(None, None)]
        runs: list[tuple[int, float]] = []
        for n, scale in input_scales:
            value = float(scale)
            if runs and runs[-1][1] == value:
                runs[-1] = (runs[-1][0] + n, value)
            else:
                runs.append((n, value))
        segments, first = [], 0
        for n, value in runs:
            rows = None if len(runs) == 1 else slice(first, first + n)
            scale = torch.full((1,), value, dtype=torch.float32, device=self.weight.codes.device)
            segments.append(Segment(rows, scale))
            first += n
        return segments

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        if not self.native:
            return w8a16_matmul(x, self.weight, self.bias, e4m3_decode_finite, self.chip)
        parts = [self.multiply(*self.round_rows(x, segment), segment) for segment in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def round_rows(self, x: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, K] -> codes uint8 [M, K] and scales float32 [M, G], as `multiply` takes them."""
        block = self.weight.block_k if self.weight.blocked else None
        return quantize_rows(x, e4m3_encode, LARGEST, block=block, scale=segment.input_scale, native=self.units)

    def multiply(self, codes: torch.Tensor, scales: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Rounded rows -> this segment's outputs [M, N]."""
        weight, bias = segment.part(self.weight, self.bias)
        if self.library and len(codes) and not takes_few_rows(self.chip, len(codes), weight):
            return torch._scaled_mm(
                codes.view(E4M3), weight.codes.view(E4M3).t(), scale_a=scales, scale_b=weight.scales.t(),
                bias=bias, out_dtype=self.dtype, use_fast_accum=True,
            )  # fmt: skip
        return w8a8_matmul(
            codes, scales, weight, bias, self.dtype, e4m3_dot, native=self.units, chip=self.chip
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        named = self.weight.buffers()
        if self.bias is not None:
            named["bias"] = self.bias
        for i, segment in enumerate(self.segments):
            if segment.input_scale is not None:
                named[f"input_scale.{i}"] = segment.input_scale
        return named


def fits_library(weight: ByteWeight) -> bool:
    """Whether the library's GEMM takes this weight: a scale a row, sizes in its multiples."""
    sizes = (weight.out_features, weight.in_features)
    return not weight.blocked and weight.rows is None and all(n % LIBRARY_MULTIPLE == 0 for n in sizes)
