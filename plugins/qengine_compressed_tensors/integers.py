"""Integer weights of a compressed-tensors file, whichever of its layouts they lie in: W = (code - zero) * scale.

Codes and zeros are made unsigned (stored value = signed value + 2 ** (bits - 1)), as every 4- and 8-bit kernel here
takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from qengine.plugin import LinearSpec, TensorNeed
from qengine_compressed_tensors.layout import Packing, unpack, words_of
from qengine_kernels.cpu_linear.reference import dequantize

FLOATS = ("F16", "BF16", "F32")
SIGNED = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}


@dataclass(frozen=True)
class Codes:
    """One linear's weight, decoded: codes uint8 [N, K], scales [N, G] as stored, zeros uint8 [N, G] or None (the
    middle code everywhere), `order` int32 [K] or None: the input channel of each column of codes, when columns are
    sorted by group."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None


@dataclass(frozen=True)
class IntFormat:
    """How integer weights of one module lie in the file.

    `group_size` -1 is one group a row. `scalar`: the scale's shape where one scale is for all, else None. `packing`
    "bytes": an int8 `weight`, else int32 words in `weight_packed`. `zeros` None: symmetric, else how weight_zero_point
    is stored. `reordered`: there is a weight_g_idx. `scale_dtype` is the scales' safetensors code.
    """

    bits: int
    group_size: int
    scalar: tuple[int, ...] | None
    packing: Packing | Literal["bytes"]
    zeros: Packing | Literal["plain"] | None
    reordered: bool = False
    scale_dtype: str = "BF16"

    @property
    def middle(self) -> int:
        """The stored value that means 0 in symmetric weights."""
        return 1 << (self.bits - 1)

    @property
    def scale_bytes(self) -> int:
        return 4 if self.scale_dtype == "F32" else 2

    @property
    def extent(self) -> str:
        """What a scale is for."""
        if self.scalar is not None:
            return "per tensor"
        return "per channel" if self.group_size == -1 else f"g{self.group_size}"

    def __str__(self) -> str:
        symmetry = "" if self.zeros is None else " asymmetric"
        return f"{self.bits}-bit {self.extent}{symmetry}{' act-order' if self.reordered else ''}"

    def groups(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def tensors(self, spec: LinearSpec) -> list[TensorNeed]:
        n, k = spec.out_features, spec.in_features
        groups = self.groups(k)
        if self.packing == "bytes":
            needs = [TensorNeed("weight", (n, k), ("I8",), output_dim=0, input_dim=1)]
        else:
            words = words_of(k, self.bits, self.packing)
            needs = [TensorNeed("weight_packed", (n, words), ("I32",), output_dim=0, input_dim=1)]
            needs.append(TensorNeed("weight_shape", (2,), ("I64", "I32"), required=False))
        floats = tuple(sorted(FLOATS, key=lambda code: code != self.scale_dtype))
        needs.append(self._grouped("weight_scale", n, groups, floats))
        if self.zeros == "plain":
            needs.append(self._grouped("weight_zero_point", n, groups, tuple(SIGNED)))
        elif self.zeros is not None:
            rows = words_of(n, self.bits, self.zeros)
            needs.append(TensorNeed("weight_zero_point", (rows, groups), ("I32",), output_dim=0, input_dim=1))
        if self.reordered:
            needs.append(TensorNeed("weight_g_idx", (k,), ("I32", "I64"), input_dim=0))
        return needs

    def _grouped(self, leaf: str, n: int, groups: int, dtypes: tuple[str, ...]) -> TensorNeed:
        if self.scalar is not None:
            return TensorNeed(leaf, self.scalar, dtypes)
        return TensorNeed(leaf, (n, groups), dtypes, output_dim=0, input_dim=1)

    def decode(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Codes:
        """Raises ValueError for values that contradict the format. The work is done on `device`."""
        n, k = spec.out_features, spec.in_features
        check_shape(spec, tensors.get("weight_shape"))
        scales = tensors["weight_scale"].to(device)
        if not bool(torch.isfinite(scales).all()):
            bad = int((~torch.isfinite(scales)).sum())
            raise ValueError(f"{spec.name}.weight_scale holds {bad} values that are not finite")
        zeros = self._zeros(spec, tensors, device)
        if self.scalar is not None:
            scales = scales.reshape(1, 1).expand(n, 1).contiguous()
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(n, 1).contiguous()
        if self.packing == "bytes":
            codes = self._offset(f"{spec.name}.weight", tensors["weight"].to(device))
        else:
            codes = unpack(tensors["weight_packed"].to(device), self.bits, k, self.packing)
        order = None
        if self.reordered:
            order = channel_order(spec, tensors["weight_g_idx"], self.group_size, self.groups(k))
            if order is not None:
                order = order.to(device)
                codes = codes.index_select(1, order)
        return Codes(codes, scales, zeros, order)

    def _zeros(
        self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> torch.Tensor | None:
        if self.zeros is None:
            return None
        stored = tensors["weight_zero_point"].to(device)
        if self.zeros == "plain":
            return self._offset(f"{spec.name}.weight_zero_point", stored)
        return unpack(stored.t().contiguous(), self.bits, spec.out_features, self.zeros).t().contiguous()

    def _offset(self, name: str, signed: torch.Tensor) -> torch.Tensor:
        """Signed values -> unsigned codes."""
        low, high = signed.aminmax() if signed.numel() else (0, 0)
        if int(low) < -self.middle or int(high) >= self.middle:
            raise ValueError(f"{name} holds values from {int(low)} to {int(high)}, which {self.bits} bits do not hold")
        if signed.dtype is torch.int8:  # one byte all the way: adding 128 mod 256 is exact for every width up to 8
            return signed.view(torch.uint8) + self.middle
        return (signed + self.middle).to(torch.uint8)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 [N, K], channels in the file's order."""
        return self.dense(self.decode(spec, tensors, torch.device("cpu")))

    def dense(self, c: Codes, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`dtype` [N, K], computed in float32, channels in the file's order."""
        zeros = torch.full_like(c.scales, self.middle, dtype=torch.float32) if c.zeros is None else c.zeros
        w = dequantize(c.codes, c.scales, zeros, self.group_size, dtype)
        return w if c.order is None else torch.empty_like(w).index_copy_(1, c.order.long(), w)


def check_shape(spec: LinearSpec, shape: torch.Tensor | None) -> None:
    have = None if shape is None else shape.tolist()
    if have is not None and have != [spec.out_features, spec.in_features]:
        raise ValueError(
            f"{spec.name}.weight_shape says {have}, the model needs [{spec.out_features}, {spec.in_features}]"
        )


def channel_order(spec: LinearSpec, g_idx: torch.Tensor, group_size: int, groups: int) -> torch.Tensor | None:
    """int32 [K] that sorts the input channels by group; None when they are sorted, or g_idx is not set (all -1).

    Raises ValueError unless each group has group_size channels (the last one what remains).
    """
    g_idx = g_idx.to("cpu", torch.int64)
    if bool((g_idx == -1).all()):
        return None
    k = spec.in_features
    need = torch.arange(k) // (k if group_size == -1 else group_size)
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], need):
        low, high = g_idx.aminmax()
        raise ValueError(
            f"{spec.name}.weight_g_idx does not give each of the {groups} groups its {group_size} channels "
            f"(values from {int(low)} to {int(high)})"
        )
    return None if torch.equal(order, torch.arange(k)) else order.to(torch.int32)


def joined(parts: Sequence[Codes]) -> Codes:
    """Shards that share their order, stacked along the outputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in parts if p.zeros is not None])
    return Codes(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), zeros, first.order)


def same_order(parts: Sequence[Codes]) -> bool:
    orders = [p.order for p in parts]
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)
