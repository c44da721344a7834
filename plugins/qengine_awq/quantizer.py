"""Makes AWQ-format tensors from dense weights; the result is an ordinary AutoAWQ gemm file.

Each group is rounded with a search for the best clip. With what calibration saw of a linear's inputs, the output's
error decides, and factors on the channels are chosen first (`qengine_awq.search`); without, the weight's own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec
from qengine_awq.layout import SYMMETRIC_ZERO, pack
from qengine_awq.search import group_moments, search_factors

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68)
"""Shares of a group's range that are tried; the least squared error wins."""
CHUNK = 1 << 16
"""Weights worked on at a time: the passes then stay in the second-level cache."""
LEAST_SCALE = 2.0**-20
"""Keeps an all-zero group's scale a positive float16."""

Error = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(weights, codes [groups, size], scales, zeros [groups]) -> [groups]."""
Refit = Error
"""The same -> better scales for these codes."""


class AwqQuantizer(CalibratedQuantizer):
    """4-bit gemm layout. `group_size` -1 is one group a row; without `zero_point` the zero is 8 and not stored."""

    def __init__(self, group_size: int = 128, zero_point: bool = True) -> None:
        if group_size < 1 and group_size != -1:
            raise ValueError(f"group_size {group_size} makes no sense; need: a positive number, or -1 for one group")
        self.group_size = group_size
        self.zero_point = zero_point

    def accepts(self, spec: LinearSpec) -> str | None:
        if spec.name.rpartition(".")[2] in ("lm_head", "embed_out", "output"):
            return "the output head stays 16-bit, as AutoAWQ leaves it"
        if spec.out_features % 8:
            return f"have: {spec.out_features} outputs; need: a multiple of 8"
        if self.group_size != -1 and spec.in_features % self.group_size:
            return f"have: {spec.in_features} inputs; need: a multiple of group size {self.group_size}"
        return None

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [out, in] -> qweight I32 [in, out / 8], scales F16 [groups, out] and (with zero points) qzeros I32
        [groups, out / 8]. Raises ValueError for weights that are not finite or not accepted."""
        if reason := self.accepts(spec):
            raise ValueError(f"{spec.name}: {reason}")
        n, k = weight.shape
        groups = weight.detach().to("cpu").reshape(-1, self._size(k))
        codes = torch.empty(groups.shape, dtype=torch.uint8)
        scales = torch.empty(len(groups), dtype=torch.float16)
        zeros = torch.empty(len(groups), dtype=torch.uint8)
        step = max(1, CHUNK // groups.shape[1])
        for a in range(0, len(groups), step):
            part = slice(a, a + step)
            codes[part], scales[part], zeros[part] = self._search(groups[part].to(torch.float32), squared_error, refit)
        return self._tensors(spec, codes.view(n, k), scales.view(n, -1), zeros.view(n, -1))

    def quantize_calibrated(
        self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats
    ) -> dict[str, torch.Tensor]:
        """As `quantize`; the error of each group's part of the outputs decides on its grid."""
        if reason := self.accepts(spec):
            raise ValueError(f"{spec.name}: {reason}")
        n, k = weight.shape
        size = self._size(k)
        moments = group_moments(stats, size)
        codes = torch.empty((n, k), dtype=torch.uint8)
        scales = torch.empty((n, k // size), dtype=torch.float16)
        zeros = torch.empty((n, k // size), dtype=torch.uint8)
        for g, moment in enumerate(moments):
            part = slice(g * size, (g + 1) * size)
            w = weight[:, part].to(torch.float32)
            found = self._search(w, OutputError(moment), OutputRefit(moment))
            codes[:, part], scales[:, g], zeros[:, g] = (t.cpu() for t in found)
        return self._tensors(spec, codes, scales, zeros)

    def input_factors(
        self, readers: Sequence[tuple[LinearSpec, torch.Tensor]], stats: InputStats, channels: torch.Tensor | None
    ) -> torch.Tensor | None:
        return search_factors([weight for _, weight in readers], stats, channels, self._rounded)

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [N, K] on the grid of each group's whole range."""
        w = weight.reshape(-1, self._size(weight.shape[1]))
        scale, zero = self._grid(w.amin(1).clamp_max_(0), w.amax(1).clamp_min_(0))
        return round_to(w, scale, zero).sub_(zero[:, None]).mul_(scale[:, None]).view_as(weight)

    def _size(self, in_features: int) -> int:
        return in_features if self.group_size == -1 else self.group_size

    def _tensors(
        self, spec: LinearSpec, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """codes [N, K], scales and zeros [N, groups] -> the file's tensors."""
        if not torch.isfinite(scales).all():
            raise ValueError(f"{spec.name}: weights are not finite or exceed float16")
        out = {"qweight": pack(codes.t()), "scales": scales.t().contiguous()}
        if self.zero_point:
            out["qzeros"] = pack(zeros.t())
        return out

    def _search(
        self, w: torch.Tensor, error_of: Error, refitted: Refit
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """w float32 [groups, size] -> codes, scales and zeros with the least error found."""
        low, high = w.amin(1).clamp_max_(0), w.amax(1).clamp_min_(0)
        best: torch.Tensor | None = None
        for clip in CLIPS:
            scale, zero = self._grid(low * clip, high * clip)
            error = error_of(w, round_to(w, scale, zero), scale, zero)
            if best is None:
                best, best_scale, best_zero = error, scale, zero
                continue
            better = error < best
            best = torch.where(better, error, best)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
        assert best is not None
        codes = round_to(w, best_scale, best_zero)
        scale = refitted(w, codes, best_scale, best_zero)
        keep = error_of(w, codes, scale, best_zero) < best
        best_scale = torch.where(keep, scale, best_scale)
        return codes.to(torch.uint8), best_scale.to(torch.float16), best_zero.to(torch.uint8)

    def _grid(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale (a float16 value) and zero of a grid that spans low..high."""
        if not self.zero_point:
            widest = torch.maximum(high / (15 - SYMMETRIC_ZERO), -low / SYMMETRIC_ZERO)
            scale = as_float16(widest.clamp_min(LEAST_SCALE))
            return scale, torch.full_like(scale, SYMMETRIC_ZERO)
        scale = as_float16(((high - low) / 15).clamp_min(LEAST_SCALE))
        return scale, (-low / scale).round_().clamp_(0, 15)

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "zero_point": self.zero_point,
            "version": "gemm",
            "modules_to_not_convert": list(skipped) or None,
        }


def as_float16(x: torch.Tensor) -> torch.Tensor:
    """float32 values that float16 holds."""
    return x.to(torch.float16).to(torch.float32)


def round_to(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes (as float32) of w [groups, size] on the grid of each group."""
    return w.mul(scale.reciprocal()[:, None]).add_(zero[:, None]).round_().clamp_(0, 15)


def squared_error(w: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """[groups]."""
    error = (codes - zero[:, None]).mul_(scale[:, None]).sub_(w)
    return error.square_().sum(1)


def refit(w: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The scale with the least squared error for fixed codes, as a float16 value."""
    centred = codes - zero[:, None]
    power = centred.square().sum(1)
    fitted = (centred * w).sum(1) / power.clamp_min(1.0)
    return as_float16(torch.where((power > 0) & (fitted > LEAST_SCALE), fitted, scale))


class OutputError:
    """Mean square of what a group's rounding does to the outputs: d moment d^T for each row d of differences."""

    def __init__(self, moment: torch.Tensor) -> None:
        self.moment = moment

    def __call__(self, w: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        d = (codes - zero[:, None]).mul_(scale[:, None]).sub_(w)
        return (d @ self.moment).mul_(d).sum(1)


class OutputRefit:
    """The scale with the least output error for fixed codes, as a float16 value."""

    def __init__(self, moment: torch.Tensor) -> None:
        self.moment = moment

    def __call__(self, w: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        centred = codes - zero[:, None]
        weighted = centred @ self.moment
        power = (weighted * centred).sum(1)
        fitted = (weighted * w).sum(1) / power.clamp_min(1e-12)
        return as_float16(torch.where((power > 1e-12) & (fitted > LEAST_SCALE), fitted, scale))
