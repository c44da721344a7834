"""What a tensor layout of AWQ answers, and how many groups' scales it stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from qengine.plugin import LinearSpec, TensorInfo, TensorNeed

FLOATS = ("F16", "BF16", "F32")
GUESSES = (-1, 16, 32, 64, 128, 256, 512, 1024)
"""Group sizes that writers use; where nothing states one, the first that fits the shapes counts."""

Shapes = dict[str, tuple[int, ...]]


class Layout(ABC):
    """How one AWQ writer lays out a linear's tensors. Stateless; `to_gemm` is what all readers share from there on.

    `stated` are the values of `version`, `format` or `backend` that mean it. `group_dim` is the dimension of scales
    that runs along the groups.
    """

    name: ClassVar[str]
    stated: ClassVar[tuple[str, ...]]
    group_dim: ClassVar[int] = 0
    guesses: ClassVar[Sequence[int]] = GUESSES
    may_have_zeros: ClassVar[bool] = True

    @abstractmethod
    def fits(self, k: int, n: int, tensors: Mapping[str, TensorInfo]) -> bool:
        """Whether every tensor that is there could be this layout's, whatever the group size."""

    @abstractmethod
    def needs(self, spec: LinearSpec, group_size: int, zero_point: bool) -> list[TensorNeed]:
        """The tensors of one linear, its bias aside."""

    @abstractmethod
    def to_gemm(
        self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor], group_size: int
    ) -> dict[str, torch.Tensor]:
        """The same weight as qweight, scales and (with zeros) qzeros of the gemm layout, on the tensors' device.

        Raises ValueError for data that contradicts itself.
        """

    def slots(self, k: int, group_size: int) -> int:
        """Size of `scales` along `group_dim`. Raises ValueError for a group size that this layout cannot hold."""
        return groups_of(k, group_size)

    def zeros_in(self, tensors: Mapping[str, TensorInfo]) -> bool:
        """Whether the file holds zero points."""
        return "qzeros" in tensors


def groups_of(k: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-k // group_size)


def shaped(tensors: Mapping[str, TensorInfo], leaf: str, dtypes: Sequence[str], *shape: int | None) -> bool:
    """True when `leaf` is not there, or has one of the dtypes and the shape (None: any size)."""
    info = tensors.get(leaf)
    if info is None:
        return True
    sizes = zip(info.shape, shape, strict=False)
    return info.dtype in dtypes and len(info.shape) == len(shape) and all(w is None or h == w for h, w in sizes)
