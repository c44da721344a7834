"""From a module's file tensors to codes sorted by group: checks of the data, and shards put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine.plugin import LinearShard
from qengine_gptq.layout import unpack
from qengine_gptq.order import read_order
from qengine_gptq.zeros import ZeroRule, contradiction, read_zeros
from qengine_kernels.cpu_linear.reference import dequantize


@dataclass
class Decoded:
    """One or more modules with the same order of inputs, stacked along their outputs.

    codes   uint8 [K, N], rows sorted by group
    scales  [G, N] as stored
    zeros   uint8 [G, N], or None where all are the middle
    order   int32 [K]: row k belongs to input order[k]; None where that is k
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    group_size: int
    bits: int

    @property
    def in_features(self) -> int:
        return self.codes.shape[0]

    def zeros_or_middle(self) -> torch.Tensor:
        if self.zeros is not None:
            return self.zeros
        return torch.full(self.scales.shape, 1 << (self.bits - 1), dtype=torch.uint8, device=self.codes.device)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """`dtype` [N, K], computed in float32, inputs in their own order."""
        codes = self.codes.t().contiguous()
        weight = dequantize(codes, self.scales.t(), self.zeros_or_middle().t(), self.group_size, dtype)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order.long(), weight)


def check_scales(shards: Sequence[LinearShard]) -> None:
    """Raises ValueError naming every shard whose scales are no finite numbers that float16 or bfloat16 could hold."""
    bad = []
    for shard in shards:
        scales = shard.tensors["scales"]
        wrong = int((~torch.isfinite(scales)).sum())
        if wrong:
            bad.append(f"{shard.spec.name}.scales: {wrong} of {scales.numel()} values are not finite")
        elif scales.dtype is torch.float32 and float(scales.abs().max()) > torch.finfo(torch.float16).max:
            bad.append(f"{shard.spec.name}.scales: a value exceeds float16")
    if bad:
        raise ValueError("; ".join(bad))


def decode(
    shard: LinearShard, bits: int, group_size: int, rule: ZeroRule, act_order: bool, device: torch.device
) -> tuple[Decoded, list[tuple[str, str]]]:
    """Consumes the shard's tensors but its bias. Also returns notes for the report. Raises ValueError naming the shard
    where g_idx is no map of its inputs or the zeros are not stored as the config says."""
    name, k, tensors = shard.spec.name, shard.spec.in_features, shard.tensors
    scales = tensors.pop("scales")
    try:
        order, about_order = read_order(tensors.pop("g_idx", None), k, group_size, scales.shape[0], act_order)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    zeros, about_zeros = read_zeros(tensors.pop("qzeros").to(device), bits, scales.shape[1], rule)
    codes = unpack(tensors.pop("qweight").to(device), bits, k)
    if order is not None:
        order = order.to(device)
        codes = codes.index_select(0, order)
    if zeros is not None and (wrong := contradiction(codes, zeros, bits, group_size, rule.stored)) is not None:
        raise ValueError(f"{name}: {wrong}")
    notes = [(name, note) for note in (about_order, about_zeros) if note is not None]
    return Decoded(codes, scales.to(device), zeros, order, group_size, bits), notes


def same_order(a: Decoded, b: Decoded) -> bool:
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def stack(parts: list[Decoded]) -> list[Decoded]:
    """Neighbours with the same order of inputs, stacked; the others stay alone."""
    runs: list[list[Decoded]] = []
    for part in parts:
        if runs and same_order(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _joined(run: list[Decoded]) -> Decoded:
    if len(run) == 1:
        return run[0]
    zeros = None
    if any(part.zeros is not None for part in run):
        zeros = torch.cat([part.zeros_or_middle() for part in run], 1)
    codes = torch.cat([part.codes for part in run], 1)
    scales = torch.cat([part.scales for part in run], 1)
    return Decoded(codes, scales, zeros, run[0].order, run[0].group_size, run[0].bits)
