"""How a model states what it needs before anything is read.

A model is built from leaves (linear, norm, embedding, ...) on a `ModelContext`. Building reads no data: every leaf
registers itself with the checkpoint names it needs. The loader balances these needs against the checkpoint's headers,
then fills one leaf at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from qengine.plugin import DeviceInfo, TensorNeed

if TYPE_CHECKING:
    from qengine.layers.attention import Attention

FLOAT_CODES = ("F16", "BF16", "F32", "F64")
"""safetensors codes of the float dtypes that a 16-bit leaf accepts."""


class Leaf(ABC):
    """A part of a model that owns tensors."""

    name: str
    """Checkpoint name of the module, such as "model.layers.0.input_layernorm"."""

    @abstractmethod
    def needs(self) -> Sequence[tuple[str, TensorNeed]]:
        """(full tensor name, need) of everything this leaf takes from the checkpoint."""

    @abstractmethod
    def resident_bytes(self, info: DeviceInfo) -> dict[str, int]:
        """Bytes that `load` will keep, by format; pure, used by the planner before anything is read."""

    @abstractmethod
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors (full name -> CPU tensor as stored), convert and place them. Consumes the dict."""

    @abstractmethod
    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor this leaf keeps after `load`, for memory reports."""


@dataclass
class ModelContext:
    """What a model is built with, and the registry that its leaves enter.

    `dtype` is the compute dtype of activations and 16-bit weights; `residual_dtype` that of the residual stream
    (float32 where float16 would overflow and on the CPU).
    """

    config: Any
    device: torch.device
    info: DeviceInfo
    dtype: torch.dtype
    residual_dtype: torch.dtype
    max_model_len: int
    leaves: list[Leaf] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)

    def add(self, leaf: Leaf) -> None:
        self.leaves.append(leaf)
