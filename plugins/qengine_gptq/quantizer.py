"""Makes GPTQ tensors from dense weights, as GPTQModel writes them (v1 zeros, g_idx).

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec
from qengine_gptq.layout import BITS, pack, pack_columns
from qengine_gptq.rounding import Grid, gptq_codes, grids, nearest_codes, shrunk

HEADS = ("lm_head", "embed_out", "output")
MULTIPLE = 32
"""Inputs and outputs of every width are packed by so many: 32 values of 3 bits are three whole words."""


class GptqQuantizer(CalibratedQuantizer):
    """`symmetric`: one zero in the middle, else a zero for each group. `act_order`: inputs with the largest activations
    are rounded first, in groups that g_idx scatters."""

    def __init__(
        self, bits: int = 4, group_size: int = 128, symmetric: bool = True, act_order: bool = True,
        damping: float = 0.01,
    ) -> None:
        """`damping` times the mean of the Hessian's diagonal is added to it; more, stepwise, where that isn't enough.

        Raises ValueError for values that make no sense.
        """
        if bits not in BITS:
            raise ValueError(f"bits {bits} is not supported by gptq; need: {' | '.join(map(str, BITS))}")
        if group_size < 1 and group_size != -1:
            raise ValueError(f"group_size {group_size} makes no sense; need: a positive number, or -1 for one group")
        if not 0 < damping < 1:
            raise ValueError(f"damping {damping} makes no sense; need: 0 < damping < 1")
        self.bits, self.group_size = bits, group_size
        self.symmetric, self.act_order, self.damping = symmetric, act_order, damping

    def accepts(self, spec: LinearSpec) -> str | None:
        if spec.name.rpartition(".")[2] in HEADS:
            return "the output head stays 16-bit"
        if spec.in_features % MULTIPLE or spec.out_features % MULTIPLE:
            return f"have: {spec.in_features} inputs and {spec.out_features} outputs; need: multiples of {MULTIPLE}"
        if self.group_size != -1 and spec.in_features % self.group_size:
            return f"have: {spec.in_features} inputs; need: a multiple of group size {self.group_size}"
        return None

    def work_bytes(self, spec: LinearSpec) -> int:
        """The moment is shrunk, put into order and damped, and inverted in float64."""
        return 12 * spec.in_features * spec.out_features + 44 * spec.in_features**2

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [out, in] -> qweight I32 [words, out], qzeros I32 [groups, words], scales F16 [groups, out], g_idx I32
        [in], each value rounded to the nearest. Raises ValueError for weights that are not finite or not accepted."""
        w = self._checked(spec, weight).to("cpu", torch.float32)
        grid = grids(w, self._size(spec), self.bits, self.symmetric)
        codes = nearest_codes(w, grid, self._plain(spec), self.bits)
        return self._tensors(codes, grid, self._plain(spec))

    def quantize_calibrated(
        self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats
    ) -> dict[str, torch.Tensor]:
        """As `quantize`; each rounding error is made up for by the inputs that are not rounded yet."""
        w = self._checked(spec, weight).to(torch.float32)
        assert stats.moment is not None
        order = torch.arange(spec.in_features, device=w.device)
        if self.act_order:
            order = torch.argsort(stats.moment.diagonal(), descending=True, stable=True)
        moment = shrunk(stats.moment, stats.tokens)
        codes, grid = gptq_codes(
            w[:, order], moment[order][:, order], self._size(spec), self.bits, self.symmetric, self.damping
        )
        back = torch.argsort(order)
        groups = (torch.arange(spec.in_features, device=w.device) // self._size(spec))[back]
        return self._tensors(codes[:, back].cpu(), Grid(grid.scale.cpu(), grid.zero.cpu()), groups.cpu())

    def _checked(self, spec: LinearSpec, weight: torch.Tensor) -> torch.Tensor:
        if reason := self.accepts(spec):
            raise ValueError(f"{spec.name}: {reason}")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{spec.name}: weights are not finite")
        return weight.detach()

    def _size(self, spec: LinearSpec) -> int:
        return spec.in_features if self.group_size == -1 else self.group_size

    def _plain(self, spec: LinearSpec) -> torch.Tensor:
        return torch.arange(spec.in_features) // self._size(spec)

    def _tensors(self, codes: torch.Tensor, grid: Grid, g_idx: torch.Tensor) -> dict[str, torch.Tensor]:
        """codes uint8 [N, K], grid [groups, N], g_idx int64 [K] -> the file's tensors."""
        scales = grid.scale.to(torch.float16)
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("scales exceed float16")
        stored = (grid.zero.to(torch.int64) - 1) & ((1 << self.bits) - 1)
        return {
            "qweight": pack(codes.t(), self.bits),
            "qzeros": pack_columns(stored, self.bits),
            "scales": scales.contiguous(),
            "g_idx": g_idx.to(torch.int32),
        }

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        """`skipped` are named by rules that leave them out; the head never counts."""
        rules: dict[str, Any] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in skipped if name not in HEADS}
        out = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": self.symmetric,
            "desc_act": self.act_order,
            "checkpoint_format": "gptq",
            "lm_head": False,
            "damp_percent": self.damping,
        }
        return out | ({"dynamic": rules} if rules else {})
