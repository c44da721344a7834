"""The weights of all experts of a layer in one allocation a tensor, filled one expert at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from qengine_kernels.w8a16_gemm import ByteWeight
from qengine_kernels.wna16_gemm import PackedWeight
from qengine_kernels.wna16_gemm.config import grouping


class Stack:
    """Equal sets of tensors, stacked along a new first dimension. Memory is taken when the first set arrives."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, index: int, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the tensors of one expert and return them as views into the stack. Raises ValueError for a set that is
        unlike the first one."""
        if not self.tensors:
            self.tensors = {
                name: torch.empty((self.count, *t.shape), dtype=t.dtype, device=t.device) for name, t in parts.items()
            }
        have, need = describe(parts), describe({name: t[0] for name, t in self.tensors.items()})
        if have != need:
            raise ValueError(f"expert {index} is stored unlike the others: have {have}, need {need}")
        for name, t in parts.items():
            self.tensors[name][index].copy_(t)
        return {name: self.tensors[name][index] for name in parts}


def describe(parts: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{n} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for n, t in sorted(parts.items()))


@dataclass(frozen=True)
class ExpertWeights:
    """What the grouped kernel reads: W_e[n, k] of E experts, value = (stored value - zero) * scale.

    values      [E, ...]: the stored elements; `value_strides` are those of (stored row along K, output)
    scales      [E, ...] or None; `scale_strides` are those of (group of inputs, row of scales); zeros like scales
    scale_rows  int32 [N]: the row of scales that each output takes, or None: its own
    columns     int32 [E, K]: the input that each weight row multiplies, or None: rows are in the order of inputs
    slots       values in one stored element; `slice_rows` as in `wna16_gemm.layout` (1 where slots is 1)
    zero        what is subtracted where there are no zeros
    routed      experts that tokens choose from, where `values` holds slots for some of them; None: E. Tiles are chosen
                for these, so that the same pairs give the same bits
    """

    values: torch.Tensor
    in_features: int
    out_features: int
    value_strides: tuple[int, int]
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    scale_strides: tuple[int, int] = (0, 0)
    scale_rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    group_size: int = 1 << 30
    slots: int = 1
    slice_rows: int = 1
    zero: int = 0
    routed: int | None = None

    @property
    def num_experts(self) -> int:
        return self.values.shape[0]

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    def grouping(self, block_w: int) -> int:
        """How often a block of `block_w` stored rows needs new scales."""
        return grouping(self.group_size, self.in_features, self.slice_rows, block_w, self.slots)


class DenseExperts:
    """float weights [N, K] of each expert."""

    def __init__(self, count: int) -> None:
        self.stack = Stack(count)

    def put(self, expert: int, weight: torch.Tensor) -> torch.Tensor:
        """weight [N, K] -> the same values, held in the stack."""
        return self.stack.put(expert, {"weight": weight})["weight"]

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the grouped kernel reads; the experts' own weights are views of it."""
        return dict(self.stack.tensors)

    def over(self, stacks: Mapping[str, torch.Tensor]) -> DenseExperts:
        """See `qengine.plugin.ExpertsOp.over`."""
        slots = DenseExperts(self.stack.count)
        slots.stack.tensors = dict(stacks)
        return slots

    @cached_property
    def weights(self) -> ExpertWeights:
        """For `grouped_matmul`, once an expert is there."""
        stacked = self.stack.tensors["weight"]
        _, n, k = stacked.shape
        return ExpertWeights(stacked, k, n, (1, k), routed=self.stack.count)


class PackedExperts:
    """A `PackedWeight` of each expert: codes of 2, 4 or 8 bits in words.

    `columns` int32 [K] is given where an expert's rows are not in the order of its inputs (GPTQ with act-order).
    """

    def __init__(self, count: int) -> None:
        self.stack = Stack(count)
        self.like: PackedWeight | None = None

    def put(self, expert: int, weight: PackedWeight, columns: torch.Tensor | None = None) -> PackedWeight:
        """The same weight, held in the stack. All experts must have one layout."""
        parts = {"words": weight.words, "scales": weight.scales, "zeros": weight.zeros, "columns": columns}
        held: dict[str, Any] = self.stack.put(expert, {n: t for n, t in parts.items() if t is not None})
        self.like = replace(weight, words=held["words"], scales=held["scales"], zeros=held.get("zeros"))
        return self.like

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the grouped kernel reads; the experts' own weights are views of it."""
        return dict(self.stack.tensors)

    def over(self, stacks: Mapping[str, torch.Tensor]) -> PackedExperts:
        """See `qengine.plugin.ExpertsOp.over`."""
        slots = PackedExperts(self.stack.count)
        slots.stack.tensors, slots.like = dict(stacks), self.like
        return slots

    @cached_property
    def weights(self) -> ExpertWeights:
        """For `grouped_matmul`, once an expert is there."""
        w, t = self.like, self.stack.tensors
        assert w is not None
        n = w.out_features
        return ExpertWeights(
            t["words"], w.in_features, n, (n, 1), t["scales"], t.get("zeros"), (n, 1), None, t.get("columns"),
            w.group_size, w.slots, w.slice_rows, w.symmetric_zero, self.stack.count,
        )  # fmt: skip


class ByteExperts:
    """A `ByteWeight` of each expert: 8-bit values as stored, with scales by row and block of inputs."""

    def __init__(self, count: int) -> None:
        self.stack = Stack(count)
        self.like: ByteWeight | None = None

    def put(self, expert: int, weight: ByteWeight) -> ByteWeight:
        """The same weight, held in the stack. Equal shapes share one map from outputs to rows of scales."""
        held = self.stack.put(expert, {"codes": weight.codes, "scales": weight.scales})
        rows = weight.rows if self.like is None else self.like.rows
        self.like = replace(weight, codes=held["codes"], scales=held["scales"], rows=rows)
        return self.like

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the grouped kernel reads; the experts' own weights are views of it."""
        return dict(self.stack.tensors)

    def over(self, stacks: Mapping[str, torch.Tensor]) -> ByteExperts:
        """See `qengine.plugin.ExpertsOp.over`. The map from outputs to rows of scales is not one of the stacks: the
        slots get a copy."""
        slots = ByteExperts(self.stack.count)
        rows = None if self.like is None or self.like.rows is None else self.like.rows.clone()
        slots.stack.tensors = dict(stacks)
        slots.like = None if self.like is None else replace(self.like, rows=rows)
        return slots

    @cached_property
    def weights(self) -> ExpertWeights:
        """For `grouped_matmul`, once an expert is there."""
        w, t = self.like, self.stack.tensors
        assert w is not None
        return ExpertWeights(
            t["codes"], w.in_features, w.out_features, (1, w.in_features), t["scales"], None, (1, w.scales.shape[1]),
            w.rows, None, w.block_k, routed=self.stack.count,
        )  # fmt: skip
