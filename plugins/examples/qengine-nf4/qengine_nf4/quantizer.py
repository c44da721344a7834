"""Makes NF4 tensors from dense weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec
from qengine_nf4.levels import LEVELS, pack

SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
"""Parts of a group's largest magnitude that are tried as its scale; the least error wins."""
LEAST_SCALE = 2.0**-20
"""Keeps the scale of an all-zero group a positive float16."""
GROUPS_AT_ONCE = 1 << 14


class NF4Quantizer(CalibratedQuantizer):
    """`group_size` inputs share a scale; the last group of a linear may be shorter."""

    wants_moment = False

    def __init__(self, group_size: int = 64) -> None:
        if group_size < 1:
            raise ValueError(f"group_size {group_size} makes no sense; need: a positive number")
        self.group_size = group_size

    def accepts(self, spec: LinearSpec) -> str | None:
        name = spec.name.rpartition(".")[2]
        return "the output head stays 16-bit" if name in ("lm_head", "embed_out", "output") else None

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """codes U8 [out, ceil(in / 2)], scales F16 [out, groups]."""
        return self._quantize(spec, weight, torch.ones(spec.in_features))

    def quantize_calibrated(
        self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats
    ) -> dict[str, torch.Tensor]:
        """As `quantize`; an input's error counts as much as its mean magnitude, squared."""
        return self._quantize(spec, weight, stats.mean_abs.float().cpu().square())

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": "nf4", "group_size": self.group_size, "modules_to_not_convert": list(skipped)}

    def _quantize(self, spec: LinearSpec, weight: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """counts float32 [in]: what an input's squared error counts."""
        w = weight.detach().to("cpu", torch.float32)
        if not torch.isfinite(w).all():
            raise ValueError(f"{spec.name}: the weight holds values that are not finite")
        n, k = w.shape
        size, padding = self.group_size, -k % self.group_size
        groups = torch.nn.functional.pad(w, (0, padding)).view(-1, size)
        importance = torch.nn.functional.pad(counts, (0, padding)).view(-1, size).repeat(n, 1)
        parts = zip(groups.split(GROUPS_AT_ONCE), importance.split(GROUPS_AT_ONCE), strict=True)
        found = [best_codes(part, own) for part, own in parts]
        codes, scales = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        if not torch.isfinite(scales).all():
            raise ValueError(f"{spec.name}: the weight exceeds float16")
        return {"codes": pack(codes.view(n, -1)[:, :k]), "scales": scales.view(n, -1)}


def best_codes(w: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w, counts float32 [groups, size] -> codes uint8 [groups, size], scales float16 [groups]."""
    levels = torch.tensor(LEVELS)
    between = (levels[1:] + levels[:-1]) / 2
    top = w.abs().amax(1)
    errors, scales = [], []
    for share in SHARES:
        scale = (top * share).clamp_min(LEAST_SCALE).half().float()
        rounded = levels[torch.bucketize(w / scale[:, None], between)] * scale[:, None]
        errors.append(((rounded - w).square() * counts).sum(1))
        scales.append(scale)
    best = torch.stack(errors).argmin(0, keepdim=True)
    scale = torch.stack(scales).gather(0, best)[0]
    return torch.bucketize(w / scale[:, None], between).to(torch.uint8), scale.half()
