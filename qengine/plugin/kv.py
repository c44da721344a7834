"""The KV-cache dtype contract.

A KV dtype says how many bytes a block takes and where each vector lies in it (`layout`), how values become bytes and
back (`encode` / `decode` in torch, `functions` as Triton device functions), which scales it takes and where it runs.
The paged-attention and cache-write kernels are templates that take these device functions; a plugin that needs more
may bring its own `bind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from qengine.plugin.device import Capability, DeviceInfo

ScaleGranularity = Literal["none", "tensor", "head"]


@dataclass(frozen=True)
class AttentionSpec:
    """Shape and rules of one attention layer.

    `scale` multiplies q.k; `sliding_window` W lets a query at position p see positions p-W+1..p; `soft_cap` c maps
    logits to c * tanh(logits / c).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class KVLayout:
    """Where K and V lie in one block of one layer; the only source of block bytes in qengine.

    The storage of one layer is uint8 [num_blocks, block_bytes]. Viewed as `dtype`, the vector of token t (0 <= t <
    block_size) and KV head h starts at element `k_offset + t * token_stride + h * head_stride` of its block (v_offset
    for V) and is `row` elements long (head_dim for one element a value; fewer when values are packed).
    Offsets and strides count elements of `dtype`. `row` may include inline scales behind the values.
    """

    block_size: int
    block_bytes: int
    dtype: torch.dtype
    k_offset: int
    v_offset: int
    token_stride: int
    head_stride: int
    row: int

    @property
    def block_elements(self) -> int:
        return self.block_bytes // self.dtype.itemsize

    @classmethod
    def dense(cls, spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> KVLayout:
        """Block = [2 (K, V), block_size, num_kv_heads, head_dim] of `dtype`, no padding."""
        token = spec.num_kv_heads * spec.head_dim
        half = block_size * token
        return cls(
            block_size=block_size,
            block_bytes=2 * half * dtype.itemsize,
            dtype=dtype,
            k_offset=0,
            v_offset=half,
            token_stride=token,
            head_stride=spec.head_dim,
            row=spec.head_dim,
        )


@dataclass
class KVScales:
    """Scales of one layer: float32 [num_kv_heads] each, multiply-to-dequantise, finite and > 0. `source` says where
    they come from ("checkpoint", "calibration file", "default 1.0")."""

    k: torch.Tensor
    v: torch.Tensor
    source: str = "default 1.0"


@dataclass(frozen=True)
class KVFunctions:
    """Triton device functions of a KV dtype, injected into the kernel templates as constexpr arguments.

    encode(x, NATIVE) : float32 block (already divided by the scale) -> block of `layout.dtype` to store
    decode(b, NATIVE) : loaded block of `layout.dtype` -> float block (float16 or float32), not yet scaled
    NATIVE is a constexpr bool: hardware conversions may be used. Both must work in Triton's interpreter with
    NATIVE=False.
    """

    encode: Any
    decode: Any


class KVDtype(ABC):
    """A KV-cache format: entry point of group `qengine.kv_dtype`. Instances are stateless."""

    name: ClassVar[str]
    contract: ClassVar[int | str]
    """The contract version that the plugin was written for: a literal, so that it stays when qengine's moves on."""
    scale_granularity: ClassVar[tuple[ScaleGranularity, ...]] = ("none",)
    max_value: ClassVar[float | None] = None
    """Largest finite stored value; scale = amax / max_value. None when the format takes no scales."""

    @abstractmethod
    def layout(self, spec: AttentionSpec, block_size: int, compute_dtype: torch.dtype) -> KVLayout:
        """Block layout of one layer."""

    @abstractmethod
    def capability(self, device: DeviceInfo, spec: AttentionSpec, compute_dtype: torch.dtype) -> Capability:
        """Pure; needs no GPU."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., head_dim] float, already divided by its scale -> [..., row] of the layout's dtype. Saturating;
        NaN stays NaN where the format has one."""

    @abstractmethod
    def decode(self, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of `encode`, exact: [..., row] stored -> [..., head_dim] of the float `dtype`, not yet scaled."""

    @abstractmethod
    def functions(self) -> KVFunctions:
        """Triton device functions; imports Triton only when called."""

    def uncalibrated_note(self) -> str | None:
        """A line for the start-up report when scales default to 1.0; None when that is harmless."""
        return None
